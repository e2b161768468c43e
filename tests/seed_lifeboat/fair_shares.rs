//! "One client cannot spend another's cache."
use super::*;

/// How a client says who it is.
#[derive(Clone, Copy, Debug)]
enum Identity {
    Session,
    BearerKey,
    ApiKey,
}

fn ask(router: &Router, identity: Identity, client: &str, body: &[u8]) -> (u64, u64) {
    let bearer = format!("Bearer sk-{client}");
    let header = match identity {
        Identity::Session => ("X-Lifeboat-Session-Id", client),
        Identity::BearerKey => ("Authorization", bearer.as_str()),
        Identity::ApiKey => ("x-api-key", client),
    };
    prefix_blocks(&router.client().ask("POST", CHAT, &[header], body))
}

/// "Each client is now guaranteed an equal share of what a backend holds, and only a client over its share is evicted first."
/// "Clients are identified by the X-Lifeboat-Session-Id header when sent, and otherwise by a one-way digest of the API key."
#[test]
fn a_noisy_client_evicts_only_its_own() {
    for identity in [Identity::Session, Identity::BearerKey, Identity::ApiKey] {
        let engines = answering(1);
        let router = router_over(&engines, "kv-aware", &["kv = { kv_capacity_blocks = 320 }"], &[]);
        // Two clients: 160 blocks each are theirs. Six prompts of some 23 blocks are within that.
        let steady: Vec<_> = (0..6).map(|number| prompt(number, 6000)).collect();
        let total: u64 = steady.iter().map(|body| ask(&router, identity, "quiet-one", body).1).sum();
        assert!((130..=160).contains(&total), "the working set is within the share: {total}");
        for number in 0..60 {
            ask(&router, identity, "noisy-one", &prompt(1000 + number, 6000));
            if number % 10 == 9 {
                for body in &steady {
                    let (matched, total) = ask(&router, identity, "quiet-one", body);
                    assert_eq!(matched, total, "{identity:?}: lost after {} of the other's", number + 1);
                }
            }
        }
        // The noisy one kept what its share holds of its latest, no more.
        let kept = (0..60)
            .rev()
            .map(|number| ask(&router, identity, "noisy-one", &prompt(1000 + number, 6000)))
            .take_while(|(matched, total)| matched == total)
            .count();
        assert!((5..=8).contains(&kept), "{identity:?}: {kept}");
    }
}

/// "A client working alone still gets the whole thing, so the guarantee costs nothing when there is no contention."
#[test]
fn a_client_alone_gets_the_whole_thing() {
    let engines = answering(1);
    let router = router_over(&engines, "kv-aware", &["kv = { kv_capacity_blocks = 320 }"], &[]);
    let each = ask(&router, Identity::Session, "alone", &prompt(0, 6000)).1;
    let fit = 320 / each;
    for number in 1..fit {
        assert_eq!(ask(&router, Identity::Session, "alone", &prompt(number, 6000)), (0, each));
    }
    for number in 0..fit {
        let found = ask(&router, Identity::Session, "alone", &prompt(number, 6000));
        assert_eq!(found, (each, each), "prompt {number} of {fit}");
    }
}

/// "The key itself is never stored or displayed", whichever algorithm goes by it, whatever the log says.
#[test]
fn an_api_key_is_shown_nowhere() {
    for name in ["sticky-session", "kv-aware"] {
        let engines = answering(2);
        let mut setup = Setup::new().log("level = \"trace\"").pool("p", &[&pool_of(name)]);
        for (engine, name) in engines.iter().zip(["a", "b"]) {
            setup = setup.server(name, engine, &[]);
        }
        let router = setup.start();
        let secrets = ["sk-wholly-secret-1", "sk-wholly-secret-2", "session-wholly-secret-3"];
        let headers = [
            [("Authorization", "Bearer sk-wholly-secret-1")],
            [("x-api-key", "sk-wholly-secret-2")],
            [("X-Lifeboat-Session-Id", "session-wholly-secret-3")],
        ];
        let mut seen = String::new();
        for (header, secret) in headers.iter().zip(secrets) {
            for path in [CHAT, "/v1/nothing"] {
                let response = router.client().ask("POST", path, header, &prompt(1, 3000));
                seen.push_str(&response.head.text());
                if name == "sticky-session" {
                    assert_eq!(response.lifeboat("Sticky-Key"), Some(digest(secret)));
                }
            }
            // A rejection, too.
            let response = router.client().ask("POST", CHAT, header, &chat("nobody", "x"));
            response.assert_rejected(404, "model_not_found");
            seen.push_str(&response.head.text());
            seen.push_str(&response.text());
        }
        for target in ["/metrics", "/admin/v1/state", "/admin/v1/config"] {
            seen.push_str(&router.admin_get(target).text());
        }
        seen.push_str(&router.log());
        for secret in secrets {
            assert!(!seen.contains(secret), "{name}: {secret} in\n{seen}");
        }
    }
}
