//! What clients see of the router: models, errors, its own headers, bodies passed as they are.

mod support;

use std::sync::Arc;

use support::*;

const MESSAGES: &str = "/v1/messages";

/// A18: the engine gets exactly the bytes the client sent: key order, spaces, number forms, escapes, unknown and repeated
/// keys, deep nesting, byte order mark, and bodies that are no JSON at all.
#[test]
fn a18_bodies_arrive_exactly_as_sent() {
    let engine = Engine::answering();
    let router = Setup::new().server("a", &engine, &[]).start();
    let deep = format!("{{\"model\":\"m\",\"x\":{}1{}}}", "[".repeat(100), "]".repeat(100));
    let bodies: Vec<Vec<u8>> = vec![
        br#"{ "stream" :false,  "zeta":1.0,"alpha":1, "model":"m","n":1e0,"return_token_ids":true , "messages":[]}"#.to_vec(),
        br#"{"messages":[{"content":"caf\u00e9 \ud83d\ude80 \/ \"","role":"user"}],"model":"\u006d"}"#.to_vec(),
        b"{\r\n\t\"model\" : \"m\" ,\r\n\t\"big\": 123456789012345678901234567890, \"neg\":-0.0, \"e\":1E+2\r\n}\r\n".to_vec(),
        br#"{"model":"m","model":"m","a":null,"a":{"model":"other"},"":[],"vllm_xargs":{"k":[1,2,{"x":[]}]}}"#.to_vec(),
        deep.into_bytes(),
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"naïve 東京 🛶 \u{2028}\"}]}".into(),
        b"\xef\xbb\xbf{\"model\":\"m\"}".to_vec(),
        b"  \n\t {\"model\":\"m\"}  \n".to_vec(),
        b"{\"model\":\"m\",\"bad\":\"\xff\xfe\x80\"}".to_vec(),
        b"{\"model\":\"m\",\"cut\":".to_vec(),
        b"model=m&x=1".to_vec(),
        b"[1,2,3]".to_vec(),
        b"null".to_vec(),
        b"\0".to_vec(),
        b"".to_vec(),
    ];
    let mut client = router.client();
    let mut count = 0;
    for body in &bodies {
        for path in
            [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", MESSAGES, "/v1/rerank", "/generate"]
        {
            let response = client.post(path, body);
            let what = format!("{:?} to {path}", String::from_utf8_lossy(body));
            assert_eq!(response.status, 200, "{what}: {}", response.text());
            count += 1;
            let requests = engine.requests();
            assert_eq!(requests.len(), count, "{what}");
            let seen = &requests[count - 1];
            assert_bytes(&seen.body, body, &what);
            assert_eq!((seen.method.as_str(), seen.target.as_str()), ("POST", path));
            assert_eq!(seen.header("Content-Type").as_deref(), Some("application/json"));
            if !body.is_empty() {
                assert_eq!(seen.header("Content-Length"), Some(body.len().to_string()), "{what}");
            }
        }
    }
}

/// A18, the other way: answers arrive exactly as the engine sent them, whatever they say they are.
#[test]
fn a18_answers_arrive_exactly_as_sent() {
    let odd =
        b"{ \"id\" :\"x\",  \"usage\":{\"completion_tokens\":1.0},\"caf\\u00e9\":\"\xff\"}\r\n ".to_vec();
    let sent = odd.clone();
    let engine = Engine::start(move |exchange| {
        let coding = exchange.request.header("X-Coding").unwrap_or_else(|| "identity".into());
        exchange.reply(200, &[("Content-Type", "application/json"), ("Content-Encoding", &coding)], &sent)
    });
    let router = Setup::new().server("a", &engine, &[]).start();
    let mut client = router.client();
    for coding in ["identity", "gzip", "bogus"] {
        for path in [CHAT, MESSAGES, "/other"] {
            let response = client.ask("POST", path, &[("X-Coding", coding)], br#"{"model":"m"}"#);
            assert_bytes(&response.body, &odd, coding);
            assert_eq!(response.header("Content-Encoding").as_deref(), Some(coding));
            assert_eq!(response.header("Content-Length"), Some(odd.len().to_string()));
        }
    }
}

fn ids(models: &serde_json::Value) -> Vec<String> {
    let data = models["data"].as_array().unwrap_or_else(|| panic!("no data in {models:#}"));
    data.iter().map(|m| m["id"].as_str().expect("an id").to_owned()).collect()
}

/// A20: the model list is the union over the engines that answer, each model once, in a stable order, with the engine's
/// own fields; an engine that hangs neither delays nor empties it. A model goes to the servers that list it; one that
/// nobody lists is 404 in the endpoint's own error shape.
#[test]
fn a20_models_are_the_union_and_route() {
    let list = |names: &[(&str, u64)]| {
        let data: Vec<_> = names
            .iter()
            .map(|(id, len)| serde_json::json!({"id": id, "object": "model", "created": 7, "owned_by": "vllm", "max_model_len": len}))
            .collect();
        Probe::Reply(200, serde_json::json!({"object": "list", "data": data}).to_string())
    };
    let one = EngineSetup::new().models(list(&[("a", 100), ("b", 200)])).start(|e| e.reply_ok());
    let two = EngineSetup::new().models(list(&[("b", 200), ("c", 300)])).start(|e| e.reply_ok());
    let three = EngineSetup::new().models(Probe::Hang).health(Probe::Hang).start(|e| e.reply_ok());
    let router = Setup::new()
        .health("timeout_ms = 500")
        .server("one", &one, &[])
        .server("two", &two, &[])
        .server("three", &three, &[])
        .start_unready();
    router.wait_up(&["one", "two"]);
    for _ in 0..3 {
        let start = now();
        let response = router.get("/v1/models");
        assert!(start.elapsed() < seconds(1), "{:?}", start.elapsed());
        assert_eq!(response.status, 200);
        let models = response.json();
        assert_eq!(models["object"], "list");
        assert_eq!(ids(&models), ["a", "b", "c"], "each once, in a stable order");
        assert_eq!(models["data"][2]["max_model_len"], 300, "the engine's own fields are kept: {models:#}");
        assert_eq!(models["data"][0]["owned_by"], "vllm");
    }
    let mut client = router.client();
    for _ in 0..6 {
        let response = client.post(CHAT, &chat("c", "x"));
        assert_eq!((response.status, response.lifeboat("Server").as_deref()), (200, Some("two")));
    }
    assert_eq!(
        (one.request_count(), two.request_count(), three.request_count()),
        (0, 6, 0),
        "`c` is at the second only"
    );
    for _ in 0..4 {
        assert_eq!(client.post(CHAT, &chat("b", "x")).status, 200);
    }
    assert_eq!((one.request_count(), two.request_count()), (2, 8), "`b` is at both");

    // Until its first check has failed, the one that hangs might serve it; from then on nobody does.
    let mut unknown = 0.0;
    eventually(seconds(2), "an unknown model is unknown", || {
        let response = client.post(CHAT, &chat("z", "x"));
        if response.status == 503 {
            return Err(response.text());
        }
        response.assert_rejected(404, "model_not_found");
        unknown += 1.0;
        Ok(())
    });
    let message =
        client.post(CHAT, &chat("z", "x")).json()["error"]["message"].as_str().unwrap_or("").to_owned();
    assert!(!message.is_empty());
    for path in ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank"] {
        client
            .post(path, br#"{"model":"z","input":"x","prompt":"x"}"#)
            .assert_rejected(404, "model_not_found");
    }
    for path in [MESSAGES, "/v1/messages/count_tokens"] {
        let response = client.post(path, &chat("z", "x"));
        assert_eq!(response.status, 404);
        assert_eq!(response.lifeboat("Reject-Reason").as_deref(), Some("model_not_found"));
        let json = response.json();
        assert_eq!(
            (&json["type"], &json["error"]["type"]),
            (&"error".into(), &"not_found_error".into()),
            "{json:#}"
        );
        assert!(json["error"]["message"].as_str().is_some_and(|m| !m.is_empty()));
        assert!(json["error"].get("code").is_none(), "Anthropic's shape, not OpenAI's: {json:#}");
    }
    assert_eq!(
        one.request_count() + two.request_count() + three.request_count(),
        10,
        "nothing was forwarded"
    );
    router.wait_metric(
        "ringway_rejections_total",
        &[("reason", "model_not_found")],
        unknown + 7.0,
        seconds(2),
    );
}

/// What engines serve may change when they start again: the list and the routes follow.
#[test]
fn models_follow_the_engines() {
    let mut one = EngineSetup::new().models(Probe::models(&["a"])).start(|e| e.reply_ok());
    let mut two = EngineSetup::new().models(Probe::models(&["b"])).start(|e| e.reply_ok());
    let router = Setup::new().server("one", &one, &[]).server("two", &two, &[]).start();
    assert_eq!(ids(&router.get("/v1/models").json()), ["a", "b"]);
    two.stop();
    router.wait_not_up("two");
    two.set_models(Probe::models(&["b", "lora-1"]));
    two.listen();
    eventually(seconds(10), "the new model is listed", || {
        let ids = ids(&router.get("/v1/models").json());
        if ids == ["a", "b", "lora-1"] { Ok(()) } else { Err(format!("{ids:?}")) }
    });
    let response = router.post(CHAT, &chat("lora-1", "x"));
    assert_eq!((response.status, response.lifeboat("Server").as_deref()), (200, Some("two")));
    one.stop();
    eventually(seconds(10), "a dead engine's model is no longer listed", || {
        let ids = ids(&router.get("/v1/models").json());
        if ids == ["b", "lora-1"] { Ok(()) } else { Err(format!("{ids:?}")) }
    });
    // It exists, but nobody can serve it now: that is not "no such model".
    router.post(CHAT, &chat("a", "x")).assert_rejected(503, "no_healthy_server").assert_retry_after();
}

/// Where an engine has no model list (404), it serves every model; configured models are not asked for.
#[test]
fn an_engine_without_a_list_serves_every_model() {
    let any = EngineSetup::new().models(Probe::Reply(404, "{}".into())).start(|e| e.reply_ok());
    let router = Setup::new().server("any", &any, &[]).start_unready();
    eventually(seconds(5), "it takes requests", || {
        let response = router.post(CHAT, &chat("whatever", "x"));
        if response.status == 200 { Ok(()) } else { Err(response.text()) }
    });
    assert_eq!(router.post(MESSAGES, &chat("something/else:v2", "x")).status, 200);

    let fixed = EngineSetup::new().models(Probe::Hang).start(|e| e.reply_ok());
    let router = Setup::new().server("fixed", &fixed, &["models = [\"only\", \"näme\"]"]).start();
    assert_eq!(router.post(CHAT, &chat("only", "x")).status, 200);
    assert_eq!(router.post(CHAT, r#"{"model":"näme"}"#.as_bytes()).status, 200);
    assert_eq!(
        router.post(CHAT, br#"{"model":"n\u00e4me"}"#).status,
        200,
        "an escaped name is the same name"
    );
    router.post(CHAT, &chat("other", "x")).assert_rejected(404, "model_not_found");
    assert_eq!(ids(&router.get("/v1/models").json()).len(), 2);
}

/// The model is found wherever it stands in the body, and only at the top: before, after and between long values, behind
/// look-alikes inside strings and nested objects.
#[test]
fn the_model_is_found_wherever_it_stands() {
    let a = EngineSetup::new().models(Probe::models(&["a"])).start(|e| e.reply_ok());
    let b = EngineSetup::new().models(Probe::models(&["b"])).start(|e| e.reply_ok());
    let router = Setup::new().server("a", &a, &[]).server("b", &b, &[]).start();
    let long = "x".repeat(300_000);
    let bodies = [
        r#"{"model":"b","messages":[]}"#.to_owned(),
        format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}],"model":"b"}}"#),
        r#"{"messages":[{"role":"user","content":"\"model\":\"a\""}],"model" : "b"}"#.to_owned(),
        r#"{"metadata":{"model":"a"},"model":"b","x":{"model":"a"}}"#.to_owned(),
        r#"{"tools":[{"model":"a"}],"a\\":"}","model":"b"}"#.to_owned(),
        r#"{"mod\u0065l":"b"}"#.to_owned(),
    ];
    let mut client = router.client();
    for body in &bodies {
        let response = client.post(CHAT, body.as_bytes());
        let head = &body[..body.len().min(80)];
        assert_eq!((response.status, response.lifeboat("Server").as_deref()), (200, Some("b")), "{head}");
    }
    // In chunks, cut anywhere.
    let body = bodies[2].as_bytes();
    for cut in 1..body.len() {
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n");
        for piece in [&body[..cut], &body[cut..]] {
            client.send(&[format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
        }
        client.send(b"0\r\n\r\n");
        assert_eq!(client.response().lifeboat("Server").as_deref(), Some("b"), "cut at {cut}");
    }
    assert_eq!(a.request_count(), 0);
}

/// The headers that say what the router did, on an answer that went through.
#[test]
fn answers_carry_the_routers_headers() {
    let engine = Engine::start(|exchange| {
        // An engine's own headers of that prefix are not the router's.
        let headers = [
            ("X-Lifeboat-Server", "forged"),
            ("x-lifeboat-pool", "forged"),
            ("X-Lifeboat-Extra", "forged"),
            ("X-LIFEBOAT-Retries", "9"),
            ("X-Other", "kept"),
        ];
        exchange.reply(200, &headers, b"{}")
    });
    let router = Setup::new()
        .pool("chat-pool", &["algorithm = \"least-connections\""])
        .server("gpu0", &engine, &["weight = 2.250", "max_concurrency = 4"])
        .start();
    let mut client = router.client();
    for (method, path) in
        [("POST", CHAT), ("POST", MESSAGES), ("GET", "/anything"), ("HEAD", "/x"), ("DELETE", "/v1/x/y")]
    {
        if method == "HEAD" {
            continue;
        }
        let response = client.ask(method, path, &[], b"");
        let text = response.head.text();
        for (name, want) in [
            ("Server", "gpu0"),
            ("Pool", "chat-pool"),
            ("Weight", "2.25"),
            ("Inflight", "1/4"),
            ("Wait-ms", "0"),
            ("Algorithm", "least-connections"),
        ] {
            assert_eq!(response.lifeboat(name).as_deref(), Some(want), "{name} of {method} {path}:\n{text}");
        }
        for name in ["Retries", "Reject-Reason", "Extra", "Sticky-Key", "Prefix-Blocks"] {
            assert_eq!(response.lifeboat(name), None, "{text}");
        }
        assert!(!text.contains("forged"), "{text}");
        assert_eq!(response.header("X-Other").as_deref(), Some("kept"));
    }
    // The engine is not told what the client said in such headers' name, or it is: but it is never trusted. A request
    // header of the prefix changes nothing in the answer.
    let response =
        client.ask("POST", CHAT, &[("X-Lifeboat-Server", "mine"), ("X-Lifeboat-Wait-ms", "5")], b"{}");
    assert_eq!(response.lifeboat("Server").as_deref(), Some("gpu0"));
    assert_eq!(response.lifeboat("Wait-ms").as_deref(), Some("0"));
}

/// Weights print in their shortest decimal form.
#[test]
fn weights_print_in_their_shortest_form() {
    let engine = Engine::answering();
    for (weight, want) in
        [("1", "1"), ("1.0", "1"), ("0.5", "0.5"), ("2.25", "2.25"), ("10", "10"), ("0.1", "0.1")]
    {
        let router = Setup::new().server("a", &engine, &[&format!("weight = {weight}")]).start();
        assert_eq!(router.post(CHAT, b"{}").lifeboat("Weight").as_deref(), Some(want), "weight = {weight}");
    }
}

/// Rejections carry what is known: reason, pool, wait and algorithm where they are, never a server. Several reasons.
#[test]
fn rejections_carry_what_is_known() {
    let engine = Engine::answering();
    let router = Setup::new().limit("body_bytes_max = 1000").pool("p", &[]).server("a", &engine, &[]).start();
    let mut client = router.client();
    let response = client.post(CHAT, &chat("nobody", "x"));
    response.assert_rejected(404, "model_not_found");
    assert_eq!(response.header("Retry-After"), None, "coming back does not help");
    let response = router.post(CHAT, &[b'x'; 1001]);
    response.assert_rejected(413, "body_too_large");
    assert_eq!(response.header("Retry-After"), None);
    engine.set_health(Probe::Reply(503, String::new()));
    router.wait_not_up("a");
    let response = router.post(CHAT, &chat("m", "x"));
    response.assert_rejected(503, "no_healthy_server").assert_retry_after();
    assert_eq!(response.lifeboat("Pool").as_deref(), Some("p"));
    // And in Anthropic's shape.
    let response = router.post(MESSAGES, &chat("m", "x"));
    assert_eq!(response.status, 503);
    response.assert_retry_after();
    assert_eq!(response.lifeboat("Reject-Reason").as_deref(), Some("no_healthy_server"));
    let json = response.json();
    assert_eq!(
        (&json["type"], &json["error"]["type"]),
        (&"error".into(), &"overloaded_error".into()),
        "{json:#}"
    );
    let metrics = router.metrics();
    for (reason, count) in [("model_not_found", 1.0), ("body_too_large", 1.0), ("no_healthy_server", 2.0)] {
        assert_eq!(metrics.sum("ringway_rejections_total", &[("reason", reason)]), count, "{reason}");
    }
    assert_eq!(engine.request_count(), 0);
}

/// The prefix of the router's headers can be renamed; then the old names are ordinary headers of the engine.
#[test]
fn the_header_prefix_can_be_renamed() {
    let engine = Engine::start(|exchange| {
        exchange.reply(200, &[("X-Boat-Server", "forged"), ("X-Lifeboat-Own", "engine's")], b"{}")
    });
    let router = Setup::new().headers("prefix = \"X-Boat-\"").server("a", &engine, &[]).start();
    let response = router.post(CHAT, b"{}");
    assert_eq!(response.header("X-Boat-Server").as_deref(), Some("a"));
    assert_eq!(response.header("X-Boat-Wait-ms").as_deref(), Some("0"));
    assert_eq!(response.lifeboat("Server"), None);
    assert_eq!(response.lifeboat("Own").as_deref(), Some("engine's"));
    let response = router.post(CHAT, &chat("nobody", "x"));
    assert_eq!(response.header("X-Boat-Reject-Reason").as_deref(), Some("model_not_found"));
}

/// Every proxied request is accounted alike, whatever its path, method or body: unknown paths, multipart uploads, plain
/// GETs. In flight while it runs, counted when it ends, within the ceiling.
#[test]
fn every_path_is_accounted_alike() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(20));
        exchange.reply(if exchange.request.method == "DELETE" { 404 } else { 200 }, &[], b"{}")
    });
    let router = Setup::new().pool("p", &[]).server("a", &engine, &["max_concurrency = 6"]).start();
    let multipart = b"--XX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--XX\r\nContent-Disposition: form-data; \
        name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\x00\xff\x01\x02RIFF\r\n--XX--\r\n";
    let requests = [
        request("POST", "/inference/v1/generate", &[], br#"{"prompt":"x"}"#),
        request(
            "POST",
            "/v1/audio/transcriptions",
            &[("Content-Type", "multipart/form-data; boundary=XX")],
            multipart,
        ),
        request("GET", "/v1/files/abc/content", &[], b""),
        request("DELETE", "/v1/responses/resp_1", &[], b""),
        request("PUT", "/anything?x=1", &[("Content-Type", "application/octet-stream")], &pattern(0, 70_000)),
        request("POST", "/tokenize", &[], b""),
        request("GET", "/version", &[], b""),
    ];
    let mut clients: Vec<_> = requests.iter().map(|_| router.client()).collect();
    for (number, (client, raw)) in clients.iter_mut().zip(&requests).enumerate() {
        client.send(raw);
        if number < 6 {
            engine.wait_requests(number + 1);
            router.wait_metric("ringway_in_flight", &[("server", "a")], number as f64 + 1.0, seconds(2));
        }
    }
    router.wait_metric("ringway_queue_depth", &[("pool", "p")], 1.0, seconds(2));
    gate.open();
    for client in &mut clients {
        let response = client.response();
        assert!(response.lifeboat("Server").is_some() && response.lifeboat("Inflight").is_some());
    }
    assert_eq!(engine.active_max(), 6);
    let seen = engine.requests();
    assert_bytes(&seen[1].body, multipart, "the upload");
    assert_eq!(seen[1].header("Content-Type").as_deref(), Some("multipart/form-data; boundary=XX"));
    assert_bytes(&seen[4].body, &pattern(0, 70_000), "the body of the PUT");
    router.wait_metric(
        "ringway_requests_total",
        &[("pool", "p"), ("server", "a"), ("status", "200")],
        6.0,
        seconds(2),
    );
    router.wait_metric(
        "ringway_requests_total",
        &[("pool", "p"), ("server", "a"), ("status", "404")],
        1.0,
        seconds(2),
    );
    router.wait_idle(seconds(1));
    assert_eq!(router.server_state("a")["dispatched"], 7);
}

/// Candidates in several pools, or a standalone one among them: weighted round robin over all, and the pool says so.
#[test]
fn candidates_of_several_pools_are_mixed() {
    let engines: Vec<_> = (0..3)
        .map(|_| EngineSetup::new().models(Probe::models(&["shared"])).start(|e| e.reply_ok()))
        .collect();
    let alone = EngineSetup::new().models(Probe::models(&["alone"])).start(|e| e.reply_ok());
    let router = Setup::new()
        .pool("p", &["algorithm = \"least-connections\""])
        .server("a", &engines[0], &[])
        .pool("q", &["algorithm = \"least-connections\""])
        .server("b", &engines[1], &[])
        .standalone("spare", &alone, &[])
        .standalone("c", &engines[2], &[])
        .start();
    let mut client = router.client();
    for _ in 0..9 {
        let response = client.post(CHAT, &chat("shared", "x"));
        assert_eq!(response.lifeboat("Pool").as_deref(), Some("mixed"));
        assert_eq!(response.lifeboat("Algorithm").as_deref(), Some("weighted-round-robin"));
    }
    assert_eq!(engines.iter().map(Engine::request_count).collect::<Vec<_>>(), [3, 3, 3]);
    let response = client.post(CHAT, &chat("alone", "x"));
    assert_eq!(response.lifeboat("Pool").as_deref(), Some("spare"), "one standalone candidate: its own name");
    assert_eq!(response.lifeboat("Server").as_deref(), Some("spare"));
}

/// An engine's own key replaces the caller's, in whichever header the caller has it; the caller's key is seen nowhere.
/// Without one the caller's passes.
#[test]
fn a_servers_own_key_replaces_the_callers() {
    let engine = Engine::answering();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "engine-secret\n").unwrap();
    let line = format!("api_key_file = \"{}\"", file.path().display());
    let router = Setup::new().server("a", &engine, &[&line]).start();
    let mut client = router.client();
    for name in ["Authorization", "x-api-key"] {
        let value = if name == "Authorization" { "Bearer caller-secret" } else { "caller-secret" };
        assert_eq!(client.ask("POST", CHAT, &[(name, value)], b"{}").status, 200);
        let seen = engine.requests().pop().unwrap();
        assert!(!seen.head.text().contains("caller-secret"), "{}", seen.head.text());
        assert_eq!(seen.header("Authorization").as_deref(), Some("Bearer engine-secret"));
    }
    let everything = format!("{}{}{}", router.metrics().text, router.state(), router.log());
    for secret in ["caller-secret", "engine-secret"] {
        assert!(!everything.contains(secret), "{secret} shows");
    }
    let router = Setup::new().server("a", &engine, &[]).start();
    router.client().ask("POST", CHAT, &[("Authorization", "Bearer own"), ("x-api-key", "own2")], b"{}");
    let seen = engine.requests().pop().unwrap();
    assert_eq!(seen.header("Authorization").as_deref(), Some("Bearer own"));
    assert_eq!(seen.header("x-api-key").as_deref(), Some("own2"));
}

/// A server's URL may have a path: it goes in front of every target, checks included.
#[test]
fn a_server_url_may_have_a_path() {
    let engine = Engine::start(|exchange| match exchange.request.target.as_str() {
        "/engine/health" => exchange.reply(200, &[], b"{}"),
        "/engine/v1/models" => {
            exchange.reply(200, &[], br#"{"object":"list","data":[{"id":"m","object":"model"}]}"#)
        }
        _ => exchange.reply_ok(),
    });
    let router = Setup::new().server_at("a", &format!("{}/engine/", engine.url()), &[]).start();
    assert_eq!(router.post("/v1/chat/completions?q=1", &chat("m", "x")).status, 200);
    let seen = engine.requests().into_iter().find(|r| r.method == "POST").unwrap();
    assert_eq!(seen.target, "/engine/v1/chat/completions?q=1");
    assert_eq!(seen.header("Host"), Some(engine.address().to_string()));
}

/// The state page: pools and servers as the admin API's reference has them, with figures that move.
#[test]
fn the_state_page_shows_pools_and_servers() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(20));
        exchange.reply_ok()
    });
    let router = Setup::new()
        .pool("p", &["algorithm = \"least-connections\"", "routing_mode = \"queue\""])
        .server("a", &engine, &["max_concurrency = 1", "weight = 1.5"])
        .start();
    let mut clients: Vec<_> = (0..3).map(|_| router.client()).collect();
    for client in &mut clients {
        client.send(&request("POST", CHAT, &[], &chat("m", "x")));
    }
    router.wait_metric("ringway_queue_depth", &[], 2.0, seconds(2));
    let state = router.state();
    let pool = state["pools"]
        .as_array()
        .unwrap()
        .iter()
        .find(|p| p["name"] == "p")
        .unwrap_or_else(|| panic!("{state:#}"));
    assert_eq!(pool["algorithm"], "least-connections");
    assert_eq!(pool["routing_mode"], "queue");
    assert_eq!(pool["queued"], 2);
    let server = &pool["servers"][0];
    assert_eq!(server["name"], "a");
    assert_eq!(server["url"], engine.url());
    assert_eq!(server["state"], "up");
    assert_eq!(server["weight"].as_f64(), Some(1.5));
    assert_eq!(server["in_flight"], 1);
    assert_eq!(server["max_concurrency"], 1);
    assert_eq!(server["models"], serde_json::json!(["m"]));
    assert!(state["shards"].as_array().is_some_and(|s| s.len() == 1), "{state:#}");
    assert!(state["uptime_s"].is_number() && state["version"].is_string(), "{state:#}");
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status, 200);
    }
    assert_eq!(router.admin_get("/admin/v1/nothing").status, 404);
}

/// The latency metrics: time to the first token of streams, time in the queue, the router's own time.
#[test]
fn latency_metrics_are_kept() {
    let engine = Engine::start(|exchange| {
        if exchange.body_has("stream")? {
            exchange.stream_head()?;
            exchange.pause(ms(120));
            exchange.chunk(b"data: 1\n\n")?;
            return exchange.end();
        }
        exchange.reply_ok()
    });
    let router = Setup::new().server("a", &engine, &[]).start();
    let mut client = router.client();
    for _ in 0..3 {
        assert_eq!(client.post(CHAT, &chat_stream("m", "x")).status, 200);
    }
    for _ in 0..5 {
        assert_eq!(client.post(CHAT, &chat("m", "x")).status, 200);
    }
    let metrics = router.metrics();
    let value = |name: &str| metrics.sum(name, &[]);
    assert_eq!(value("ringway_time_to_first_token_seconds_count"), 3.0, "streams only");
    let sum = value("ringway_time_to_first_token_seconds_sum");
    assert!((0.36..0.9).contains(&sum), "three streams of 0.12 s each: {sum}");
    assert_eq!(value("ringway_overhead_seconds_count"), 8.0);
    let sum = value("ringway_overhead_seconds_sum");
    assert!(sum > 0.0 && sum < 0.2, "the engine's time is not the router's: {sum}");
    for name in
        ["ringway_time_to_first_token_seconds", "ringway_overhead_seconds", "ringway_queue_wait_seconds"]
    {
        let bucket = format!("{name}_bucket");
        let all = metrics.sum(&bucket, &[("le", "+Inf")]);
        assert_eq!(all, value(&format!("{name}_count")), "{name}");
    }
}
