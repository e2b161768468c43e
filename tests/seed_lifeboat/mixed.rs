//! "Mixed clusters."
use super::*;

/// "If a request's candidates span several clusters, or include a standalone server, routing falls back to weighted round-robin."
/// Whatever those clusters' algorithms are; and "use routing tiers to keep such workloads apart".
#[test]
fn mixed_candidates_fall_back_and_tiers_keep_them_apart() {
    let engines = answering(4);
    let router = Setup::new()
        .pool("sticky", &[&pool_of("sticky-session")])
        .server("a", &engines[0], &[])
        .pool("kv", &[&pool_of("kv-aware")])
        .server("b", &engines[1], &[])
        .server("apart", &engines[3], &["routing_tier = \"batch\""])
        .standalone("c", &engines[2], &[])
        .start();
    let mut client = router.client();
    let mut names = String::new();
    for _ in 0..6 {
        let headers = [("X-Lifeboat-Session-Id", "s")];
        let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
        assert_eq!(algorithm(&response), "weighted-round-robin");
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("mixed"));
        for name in ["Sticky-Key", "Prefix-Blocks"] {
            assert_eq!(response.lifeboat(name), None, "of an algorithm that is not this traffic's");
        }
        names.push_str(&server(&response));
    }
    assert_eq!(names[..3], names[3..], "{names}");
    assert_eq!(counts(&engines), [2, 2, 2, 0]);
    // In a tier of its own the pool's algorithm holds again.
    for round in 0..3 {
        let headers = [("X-Lifeboat-Tier", "batch")];
        let response = client.ask("POST", CHAT, &headers, &prompt(1, 4000));
        assert_eq!(server(&response), "apart");
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("kv/batch"));
        assert_eq!(algorithm(&response), if round == 0 { "weighted-round-robin" } else { "kv-aware" });
    }
}
