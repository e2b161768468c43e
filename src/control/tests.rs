//! The control thread as a whole: real sockets, scripted engines, and shards played by the port.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::proto::backend::catalog::Address;
use crate::proto::ids::ShardId;
use crate::proto::message::{Notice, Update, UpstreamFault};
use crate::proto::report::{ServerFigures, ShardReport};

/// Shards that write down what they are told, start at once, report when asked, and are drained when told to drain.
#[derive(Debug)]
pub struct Played {
    told: Vec<Vec<Update>>,
    notices: VecDeque<(ShardId, Notice)>,
    ringer: UnixStream,
    bell: UnixStream,
    /// Requests keep running while the shards drain.
    busy: bool,
    /// The shard of that number answers no question for figures.
    mute: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct PlayedPort(Arc<Mutex<Played>>);

impl PlayedPort {
    pub fn new(shards: usize) -> PlayedPort {
        let (ringer, bell) = UnixStream::pair().unwrap();
        bell.set_nonblocking(true).unwrap();
        let port = PlayedPort(Arc::new(Mutex::new(Played {
            told: (0..shards).map(|_| Vec::new()).collect(),
            notices: VecDeque::new(),
            ringer,
            bell,
            busy: false,
            mute: None,
        })));
        for shard in 0..shards {
            port.say(shard, Notice::Started { io_uring: true, downgrade: None });
        }
        port
    }

    pub fn say(&self, shard: usize, notice: Notice) {
        let mut played = self.0.lock().unwrap();
        played.notices.push_back((ShardId(shard as u8), notice));
        played.ringer.write_all(&[1; 8]).unwrap();
    }

    /// What `look` finds in all that one shard was told, waiting for up to five seconds.
    pub fn wait<T>(&self, what: &str, shard: usize, look: impl Fn(&[Update]) -> Option<T>) -> T {
        for _ in 0..1000 {
            if let Some(found) = look(&self.0.lock().unwrap().told[shard]) {
                return found;
            }
            pause(5);
        }
        panic!("{what}: not within 5 s; shard {shard} was told {:?}", self.0.lock().unwrap().told[shard]);
    }

    pub fn told<T>(&self, shard: usize, look: impl Fn(&[Update]) -> T) -> T {
        look(&self.0.lock().unwrap().told[shard])
    }
}

impl Port for PlayedPort {
    fn shards(&self) -> usize {
        self.0.lock().unwrap().told.len()
    }
    fn update(&mut self, to: ShardId, update: Update) {
        let (busy, mute) = {
            let played = self.0.lock().unwrap();
            (played.busy, played.mute)
        };
        match update {
            Update::Report { number } if mute != Some(to.index()) => {
                let mut report = ShardReport::new(to);
                report.number = number;
                report.finished = 21;
                report.servers = vec![ServerFigures { dispatched: 7, ..ServerFigures::default() }];
                self.say(to.index(), Notice::Report(Box::new(report)));
            }
            Update::Phase(Phase::Draining) if !busy => self.say(to.index(), Notice::Drained { shard: to }),
            _ => {}
        }
        self.0.lock().unwrap().told[to.index()].push(update);
    }
    fn retry(&mut self) -> bool {
        true
    }
    fn poll(&mut self, take: &mut dyn FnMut(ShardId, Notice)) -> usize {
        let notices = std::mem::take(&mut self.0.lock().unwrap().notices);
        let count = notices.len();
        notices.into_iter().for_each(|(shard, notice)| take(shard, notice));
        count
    }
    fn arm(&self) {}
    fn wake_fd(&self) -> io::Result<OwnedFd> {
        Ok(self.0.lock().unwrap().bell.try_clone()?.into())
    }
}

#[expect(clippy::disallowed_methods, reason = "a test's own thread may sleep")]
fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// An engine that answers `/health` and `/v1/models`, each connection on a thread of its own.
struct Engine {
    address: SocketAddr,
    healthy: Arc<AtomicBool>,
    models: Arc<Mutex<(u16, &'static str)>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Engine {
    fn start(models: (u16, &'static str)) -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let engine = Engine {
            address: listener.local_addr().unwrap(),
            healthy: Arc::new(AtomicBool::new(true)),
            models: Arc::new(Mutex::new(models)),
            asked: Arc::default(),
        };
        let (healthy, models, asked) = (engine.healthy.clone(), engine.models.clone(), engine.asked.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let (healthy, models, asked) = (healthy.clone(), models.clone(), asked.clone());
                std::thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                    let Some(Ok(first)) = lines.next() else { return };
                    let head: Vec<String> =
                        lines.map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
                    let (status, body) = match first.split(' ').nth(1) {
                        Some("/health") => (if healthy.load(Ordering::Relaxed) { 200 } else { 503 }, ""),
                        Some("/v1/models") => *models.lock().unwrap(),
                        _ => (404, ""),
                    };
                    asked.lock().unwrap().push(format!("{first}\n{}", head.join("\n")));
                    let _ =
                        write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                });
            }
        });
        engine
    }
}

/// A control thread that runs, and the means to look at it.
struct Running {
    port: PlayedPort,
    admin: SocketAddr,
    end: UnixStream,
    reload: UnixStream,
    readied: Arc<AtomicUsize>,
    thread: std::thread::JoinHandle<u8>,
}

fn start(config: &str, port: PlayedPort) -> Running {
    let settings = Settings::parse(config, Path::new("/"), &[]).unwrap();
    let options = Options::new(&settings);
    let catalog = settings.catalog();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = listener.local_addr().unwrap();
    let (signals, end, reload) = Signals::by_hand();
    let readied = Arc::new(AtomicUsize::new(0));
    let (count, shards) = (readied.clone(), port.clone());
    let ready = move || {
        count.fetch_add(1, Ordering::Relaxed);
    };
    let thread = std::thread::spawn(move || {
        run(options, Clock::new(), shards, catalog, Doors { admin: listener, metrics: None }, signals, ready)
            .unwrap()
    });
    Running { port, admin, end, reload, readied, thread }
}

/// One answer on a connection of its own: head and body.
fn get(admin: SocketAddr, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(admin).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    (head.to_owned(), body.to_owned())
}

fn status(admin: SocketAddr, request: &str) -> u16 {
    get(admin, request).0[9..12].parse().unwrap()
}

fn config(driver: &str, servers: &[(&str, String, &str)]) -> String {
    let mut text = format!(
        "[runtime]\ndriver = \"{driver}\"\n[health]\ninterval_ms = 50\ntimeout_ms = 200\n\
         [limits]\ndrain_settle_ms = 60\ndrain_timeout_ms = 400\n[[pool]]\nname = \"chat\"\n"
    );
    for (name, url, more) in servers {
        text += &format!("[[pool.server]]\nname = \"{name}\"\nurl = \"{url}\"\n{more}\n");
    }
    text
}

fn health(updates: &[Update], index: u16) -> Vec<bool> {
    let of = |update: &Update| match update {
        Update::Health { backend, up } if *backend == BackendId(index) => Some(*up),
        _ => None,
    };
    updates.iter().filter_map(of).collect()
}

fn last_catalog(updates: &[Update]) -> Option<&Catalog> {
    updates.iter().rev().find_map(|update| match update {
        Update::Catalog(catalog) => Some(&**catalog),
        _ => None,
    })
}

fn last_ready(updates: &[Update]) -> Option<bool> {
    updates.iter().rev().find_map(|update| match update {
        Update::Ready(ready) => Some(*ready),
        _ => None,
    })
}

fn listed(updates: &[Update]) -> Vec<String> {
    let Some(catalog) = last_catalog(updates) else { return Vec::new() };
    let body: serde_json::Value = serde_json::from_slice(&catalog.models_body).unwrap();
    body["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
}

fn phases(updates: &[Update]) -> Vec<Phase> {
    let of = |update: &Update| match update {
        Update::Phase(phase) => Some(*phase),
        _ => None,
    };
    updates.iter().filter_map(of).collect()
}

#[test]
fn servers_come_up_are_listed_go_down_and_the_process_drains_on_both_drivers() {
    for driver in ["auto", "epoll"] {
        let one = Engine::start((200, r#"{"data":[{"id":"a"},{"id":"b","max_model_len":8}]}"#));
        let two = Engine::start((200, r#"{"data":[{"id":"b"},{"id":"c"}]}"#));
        // Accepts and never answers.
        let hangs = TcpListener::bind("127.0.0.1:0").unwrap();
        let servers = [
            ("one", format!("http://{}", one.address), ""),
            ("hangs", format!("http://{}", hangs.local_addr().unwrap()), ""),
            // A name, so that it is resolved; what it resolves to may begin with ::1.
            ("two", format!("http://localhost:{}", two.address.port()), ""),
            ("dead", "http://127.0.0.1:1".to_owned(), "models = [\"d\"]"),
        ];
        let mut running = start(&config(driver, &servers), PlayedPort::new(2));
        let port = running.port.clone();
        for shard in 0..2 {
            port.wait("all models", shard, |told| (listed(told) == ["a", "b", "c"]).then_some(()));
            port.wait("ready", shard, |told| (last_ready(told) == Some(true)).then_some(()));
        }
        // The one that hangs is looked at, too, and then unknown models are unknown.
        port.wait("settled", 0, |told| (!last_catalog(told).unwrap().learning).then_some(()));
        port.told(0, |told| {
            assert_eq!(health(told, 0), [true]);
            assert_eq!(health(told, 1), [false], "a server that hangs is said to be down");
            assert_eq!(health(told, 3), [false]);
            let catalog = last_catalog(told).unwrap();
            let group = catalog.group(catalog.route(Some(b"c"), b"").unwrap().widest());
            assert_eq!(group.candidates, [BackendId(2)]);
            assert_eq!(catalog.servers[2].address, Some(Address::Tcp(two.address)));
            let versions: Vec<u64> = told
                .iter()
                .filter_map(|u| match u {
                    Update::Catalog(catalog) => Some(catalog.version),
                    _ => None,
                })
                .collect();
            assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
            let first_ready = told.iter().position(|u| matches!(u, Update::Ready(true))).unwrap();
            let knows = told[..first_ready].iter().rev().find_map(|u| match u {
                Update::Catalog(catalog) => {
                    Some(catalog.servers[0].models.is_some() || catalog.servers[2].models.is_some())
                }
                _ => None,
            });
            assert_eq!(knows, Some(true), "readiness follows the catalog that it rests on");
        });
        assert_eq!(status(running.admin, "GET /readiness"), 200);
        assert_eq!(running.readied.load(Ordering::Relaxed), 1);

        one.healthy.store(false, Ordering::Relaxed);
        port.wait("one down", 1, |told| (health(told, 0) == [true, false]).then_some(()));
        port.wait("its models gone", 1, |told| (listed(told) == ["b", "c"]).then_some(()));
        *one.models.lock().unwrap() = (404, "");
        one.healthy.store(true, Ordering::Relaxed);
        port.wait("takes every model", 1, |told| {
            let models = last_catalog(told)?.servers[0].models.as_ref()?;
            models.is_empty().then_some(())
        });

        running.end.write_all(b"X").unwrap();
        port.wait("settling", 0, |told| (phases(told) == [Phase::Settling]).then_some(()));
        assert_eq!(status(running.admin, "GET /readiness"), 503);
        assert_eq!(status(running.admin, "GET /liveness"), 200);
        assert_eq!(running.thread.join().unwrap(), 0);
        port.told(1, |told| {
            assert_eq!(phases(told), [Phase::Settling, Phase::Draining, Phase::Stopping]);
            assert_eq!(last_ready(told), Some(false));
        });
    }
}

#[test]
fn a_list_that_cannot_be_read_is_asked_for_again_and_the_servers_key_goes_along() {
    let engine = Engine::start((500, "{}"));
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "s3cret\n").unwrap();
    let servers =
        [("one", format!("http://{}", engine.address), &*format!("api_key_file = \"{}\"", key.display()))];
    let mut settings = Settings::parse(&config("auto", &servers), Path::new("/"), &[]).unwrap();
    settings.load_files(|path| std::fs::read_to_string(path).map_err(|e| e.to_string())).unwrap();
    let (signals, mut end, _reload) = Signals::by_hand();
    let port = PlayedPort::new(1);
    let shards = port.clone();
    let (options, catalog) = (Options::new(&settings), settings.catalog());
    assert!(!options.config_text.contains("s3cret"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        run(options, Clock::new(), shards, catalog, Doors { admin: listener, metrics: None }, signals, || {})
            .unwrap()
    });
    port.wait("up", 0, |told| (health(told, 0) == [true]).then_some(()));
    assert_eq!(status(admin, "GET /readiness"), 503, "up, but nobody knows its models");
    assert!(get(admin, "GET /admin/v1/state").1.contains(r#""state":"learning""#));
    *engine.models.lock().unwrap() = (200, r#"{"data":[{"id":"late"}]}"#);
    port.wait("models", 0, |told| (listed(told) == ["late"]).then_some(()));
    port.wait("ready", 0, |told| (last_ready(told) == Some(true)).then_some(()));
    let asked = engine.asked.lock().unwrap().clone();
    assert!(asked.iter().all(|head| head.contains("Authorization: Bearer s3cret")), "{asked:?}");
    for page in ["/metrics", "/admin/v1/state", "/admin/v1/config", "/"] {
        assert!(!get(admin, &format!("GET {page}")).1.contains("s3cret"), "{page}");
    }
    end.write_all(b"X").unwrap();
    assert_eq!(thread.join().unwrap(), 0);
}

#[test]
fn the_admin_listener_answers_what_it_knows_and_says_what_it_does_not() {
    let engine = Engine::start((404, ""));
    let servers = [("one", format!("http://{}", engine.address), "")];
    let mut running = start(&config("auto", &servers), PlayedPort::new(2));
    running.port.wait("ready", 0, |told| (last_ready(told) == Some(true)).then_some(()));
    let admin = running.admin;

    let (head, page) = get(admin, "GET /metrics");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    assert!(page.contains("ringway_requests_finished_total 42\n"), "both shards were asked:\n{page}");
    assert!(page.contains("ringway_server_up{server=\"one\"} 1\n"));

    let state: serde_json::Value = serde_json::from_str(&get(admin, "GET /admin/v1/state").1).unwrap();
    let one = &state["pools"][0]["servers"][0];
    assert_eq!((&one["state"], &one["dispatched"], &one["share"]), (&"up".into(), &14.into(), &1.0.into()));
    assert_eq!(state["shards"].as_array().unwrap().len(), 2);

    let config: serde_json::Value = serde_json::from_str(&get(admin, "GET /admin/v1/config").1).unwrap();
    assert_eq!(config["health"]["interval_ms"], 50);
    assert!(get(admin, "GET /").1.contains("/admin/v1/state"));
    assert_eq!(status(admin, "GET /health"), 200);
    assert_eq!(status(admin, "HEAD /metrics"), 200);
    assert_eq!(get(admin, "HEAD /metrics").1, "");
    assert_eq!(status(admin, "GET /nothing"), 404);
    let (head, _) = get(admin, "DELETE /metrics");
    assert!(head.starts_with("HTTP/1.1 405 ") && head.contains("\r\nAllow: GET, HEAD"), "{head}");
    assert_eq!(status(admin, "DELETE /admin/v1/servers/one"), 501);
    assert_eq!(status(admin, "GET /x y"), 400);

    // Three requests in one write, the second with a body: answered in order on one connection.
    let mut stream = TcpStream::connect(admin).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream
        .write_all(
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nPOST /admin/v1/reload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: \
              chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nGET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        )
        .unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    let statuses: Vec<&str> =
        answers.match_indices("HTTP/1.1 ").map(|(at, _)| &answers[at + 9..at + 12]).collect();
    assert_eq!(statuses, ["200", "501", "404"], "{answers}");

    // A shard that does not answer delays the page, but keeps its last figures on it.
    running.port.0.lock().unwrap().mute = Some(1);
    assert!(get(admin, "GET /metrics").1.contains("ringway_requests_finished_total 42\n"));

    // Over the limit a connection is told so.
    let held: Vec<TcpStream> =
        (0..admin::CONNECTIONS_MAX).map(|_| TcpStream::connect(admin).unwrap()).collect();
    pause(50);
    assert_eq!(status(admin, "GET /health"), 503);
    drop(held);
    pause(50);
    assert_eq!(status(admin, "GET /health"), 200);

    running.reload.write_all(b"X").unwrap();
    assert_eq!(status(admin, "GET /health"), 200, "a reload request changes nothing");
    running.end.write_all(b"X").unwrap();
    assert_eq!(running.thread.join().unwrap(), 0);
}

#[test]
fn the_drain_limit_and_a_second_signal_force_the_end() {
    for second in [false, true] {
        let servers = [("dead", "http://127.0.0.1:1".to_owned(), "")];
        let mut running = start(&config("auto", &servers), PlayedPort::new(2));
        running.port.0.lock().unwrap().busy = true;
        running.end.write_all(b"X").unwrap();
        running.port.wait("draining", 0, |told| phases(told).contains(&Phase::Draining).then_some(()));
        if second {
            running.end.write_all(b"X").unwrap();
        }
        assert_eq!(running.thread.join().unwrap(), 3);
        running.port.told(1, |told| assert_eq!(phases(told).last(), Some(&Phase::Stopping)));
    }
}

#[test]
fn a_shard_that_fails_to_start_ends_the_process() {
    let servers = [("dead", "http://127.0.0.1:1".to_owned(), "")];
    let port = PlayedPort::new(1);
    port.0.lock().unwrap().notices.clear();
    let running = start(&config("auto", &servers), port.clone());
    port.say(0, Notice::Failed { shard: ShardId(0), text: "no ring".into() });
    assert_eq!(running.thread.join().unwrap(), state::EXIT_NOT_STARTED);
    assert_eq!(running.readied.load(Ordering::Relaxed), 0);
}

#[test]
fn a_benched_server_is_not_routable_until_it_is_back() {
    let engine = Engine::start((404, ""));
    let servers = [("one", format!("http://{}", engine.address), "")];
    let mut running = start(&config("auto", &servers), PlayedPort::new(1));
    let (port, one) = (running.port.clone(), BackendId(0));
    port.wait("ready", 0, |told| (last_ready(told) == Some(true)).then_some(()));
    for _ in 0..3 {
        port.say(0, Notice::UpstreamFault { backend: one, fault: UpstreamFault::Connect, errno: 111 });
    }
    port.say(0, Notice::Benched { backend: one, ms: 60_000 });
    port.wait("not ready", 0, |told| (last_ready(told) == Some(false)).then_some(()));
    assert!(get(running.admin, "GET /metrics").1.contains("ringway_server_benched{server=\"one\"} 1\n"));
    port.say(0, Notice::Unbenched { backend: one });
    port.wait("ready again", 0, |told| (last_ready(told) == Some(true)).then_some(()));
    running.end.write_all(b"X").unwrap();
    assert_eq!(running.thread.join().unwrap(), 0);
}

/// The real rings: notices wake the sleeping control thread, and its updates arrive.
#[test]
fn over_the_mesh_a_shard_is_heard_at_once_on_both_drivers() {
    for driver in ["auto", "epoll"] {
        let engine = Engine::start((404, ""));
        let servers = [("one", format!("http://{}", engine.address), "")];
        let settings = Settings::parse(&config(driver, &servers), Path::new("/"), &[]).unwrap();
        let (mut ports, control) = crate::mesh::build(1).unwrap();
        let mut shard = ports.remove(0);
        let (options, catalog) = (Options::new(&settings), settings.catalog());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let admin = listener.local_addr().unwrap();
        let (signals, mut end, _reload) = Signals::by_hand();
        let thread = std::thread::spawn(move || {
            run(
                options,
                Clock::new(),
                control,
                catalog,
                Doors { admin: listener, metrics: None },
                signals,
                || {},
            )
            .unwrap()
        });
        shard.notify(Notice::Started { io_uring: true, downgrade: None });
        let player = std::thread::spawn(move || {
            let mut seen = Vec::new();
            loop {
                pause(1);
                while let Some(update) = shard.poll_update() {
                    match &update {
                        Update::Report { number } => {
                            let mut report = ShardReport::new(ShardId(0));
                            report.number = *number;
                            report.finished = 5;
                            shard.notify(Notice::Report(Box::new(report)));
                        }
                        Update::Phase(Phase::Draining) => {
                            shard.notify(Notice::Drained { shard: ShardId(0) });
                        }
                        Update::Phase(Phase::Stopping) => {
                            seen.push(update);
                            return seen;
                        }
                        _ => {}
                    }
                    seen.push(update);
                }
            }
        });
        while status(admin, "GET /readiness") != 200 {
            pause(5);
        }
        let clock = Clock::new();
        for _ in 0..10 {
            assert!(get(admin, "GET /metrics").1.contains("ringway_requests_finished_total 5\n"));
        }
        // Were notices only seen at the regular turn or after the wait for reports, this would take 2 s and more.
        let took_ms = clock.now().0 / 1_000_000;
        assert!(took_ms < 1000, "ten pages took {took_ms} ms");
        end.write_all(b"X").unwrap();
        assert_eq!(thread.join().unwrap(), 0);
        let seen = player.join().unwrap();
        assert_eq!(phases(&seen), [Phase::Settling, Phase::Draining, Phase::Stopping]);
        assert_eq!(last_ready(&seen), Some(false));
    }
}
