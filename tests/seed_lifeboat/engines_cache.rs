//! What "a backend holds" is as much as the engine says that it can.
use super::*;

/// An engine that says how large its cache is, in its own metrics, is remembered for no more.
#[test]
fn an_engines_own_cache_size_bounds_what_is_remembered() {
    // 16 tokens a block, 400 blocks: 6,400 tokens, some 25,600 bytes at four bytes a token: 100 blocks of the router's.
    let page = "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"400\"} 1.0\n\
                vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 0.0\n";
    let engines = [EngineSetup::new()
        .publishes("/metrics", Probe::Reply(200, page.into()))
        .start(|exchange| exchange.reply_ok())];
    let router = router_over(&engines, "kv-aware", &[], &[]);
    let mut client = router.client();
    let mut ask = |number| prefix_blocks(&client.post(CHAT, &prompt(number, 6000)));
    eventually(seconds(10), "the engine's size is known and holds", || {
        let first = ask(0);
        // Nine more of 23 blocks: over 100, under the default of 65,536.
        let others: Vec<_> = (1..10).map(&mut ask).collect();
        let again = ask(0);
        match again.0 < again.1 {
            true => Ok(()),
            false => Err(format!("{first:?}, {others:?}, {again:?}")),
        }
    });
    // Two fit.
    ask(100);
    ask(101);
    let (matched, total) = ask(100);
    assert_eq!(matched, total);
}

/// What an engine has reported counts, though the client leaves at the stream's last event and never takes the framing's end.
#[test]
fn a_report_counts_though_the_client_leaves_at_the_last_event() {
    let engines = [Engine::start(|exchange| {
        exchange.stream_head()?;
        let usage = br#"{"prompt_tokens":1500,"prompt_tokens_details":{"cached_tokens":40}}"#;
        exchange
            .chunk(&[b"data: {\"choices\":[],\"usage\":", &usage[..], b"}\n\ndata: [DONE]\n\n"].concat())?;
        // The last chunk is held back until the router, whose client has gone, closes.
        exchange.wait_close(seconds(10));
        Ok(Next::Close)
    })];
    let router = router_over(&engines, "kv-aware", &[], &[]);
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &prompt(1, 6000)));
    let (status, head, _) = client.head().unwrap();
    assert_eq!(status, 200);
    let mut framing = Client::framing("POST", status, &head).unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"[DONE]\n\n") {
        got.extend(client.piece(&mut framing).unwrap().expect("the stream goes on"));
    }
    drop(client);
    router.wait_metric("ringway_reported_prompt_tokens_total", &[], 1500.0, seconds(5));
    router.wait_metric("ringway_reported_cached_tokens_total", &[], 40.0, seconds(1));
    router.wait_idle(seconds(2));
}
