//! The router under test: a child process, its files, its signals.
//!
//! *Invariant*: a router that panicked, or that ended without being told to, fails its test when it is dropped. The
//! process is killed by its id, and dies with the test process.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::client::{Client, Response, once};
use super::engine::Engine;
use super::metrics::Metrics;
use super::time::{eventually, ms, now, seconds};

/// Words by which the state page says that a server takes requests.
const UP: &str = "up";

/// A configuration in the making. Lines are TOML, `key = value`.
pub struct Setup {
    cores: String,
    runtime: Vec<String>,
    listener: Vec<String>,
    limits: Vec<String>,
    headers: Vec<String>,
    health: Vec<String>,
    log: Vec<String>,
    pools: Vec<(Vec<String>, Vec<Vec<String>>)>,
    standalone: Vec<Vec<String>>,
}

/// The processors this process may use, as the kernel lists them.
pub fn cpus() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .expect("the kernel lists the allowed processors");
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let bound = |text: &str| text.trim().parse::<usize>().expect("a processor number");
        cpus.extend(bound(from)..=bound(to));
    }
    cpus
}

impl Default for Setup {
    fn default() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let cpus = cpus();
        let cpu = cpus[NEXT.fetch_add(1, Ordering::Relaxed) % cpus.len()];
        Setup {
            cores: cpu.to_string(),
            runtime: Vec::new(),
            listener: Vec::new(),
            limits: Vec::new(),
            headers: Vec::new(),
            // A machine busy with other tests must not look like a dead engine.
            health: vec!["interval_ms = 200".into(), "timeout_ms = 5000".into()],
            log: Vec::new(),
            pools: Vec::new(),
            standalone: Vec::new(),
        }
    }
}

/// Sets `line`'s key, in place of an earlier line with that key.
fn set(lines: &mut Vec<String>, line: &str) {
    let key = |line: &str| line.split('=').next().expect("split gives one").trim().to_owned();
    lines.retain(|have| key(have) != key(line));
    lines.push(line.to_owned());
}

impl Setup {
    /// One shard, engines checked every 200 ms with much patience, no pool yet.
    pub fn new() -> Setup {
        Setup::default()
    }

    /// `shards` shards, spread over the processors there are.
    pub fn shards(mut self, shards: usize) -> Setup {
        let cpus = cpus();
        let list: Vec<_> = (0..shards).map(|shard| cpus[shard % cpus.len()].to_string()).collect();
        self.cores = list.join(",");
        self
    }
    pub fn runtime(mut self, line: &str) -> Setup {
        set(&mut self.runtime, line);
        self
    }
    pub fn listener(mut self, line: &str) -> Setup {
        set(&mut self.listener, line);
        self
    }
    pub fn limit(mut self, line: &str) -> Setup {
        set(&mut self.limits, line);
        self
    }
    pub fn headers(mut self, line: &str) -> Setup {
        set(&mut self.headers, line);
        self
    }
    pub fn health(mut self, line: &str) -> Setup {
        set(&mut self.health, line);
        self
    }
    pub fn log(mut self, line: &str) -> Setup {
        set(&mut self.log, line);
        self
    }
    /// Opens a pool; the servers that follow are in it.
    pub fn pool(mut self, name: &str, lines: &[&str]) -> Setup {
        let mut all = vec![format!("name = \"{name}\"")];
        all.extend(lines.iter().map(|l| (*l).to_owned()));
        self.pools.push((all, Vec::new()));
        self
    }
    /// Adds a server to the pool opened last, `default` if none is.
    pub fn server(self, name: &str, engine: &Engine, lines: &[&str]) -> Setup {
        self.server_at(name, &engine.url(), lines)
    }
    pub fn server_at(mut self, name: &str, url: &str, lines: &[&str]) -> Setup {
        if self.pools.is_empty() {
            self = self.pool("default", &[]);
        }
        let server = server_lines(name, url, lines);
        self.pools.last_mut().expect("just made").1.push(server);
        self
    }
    pub fn standalone(mut self, name: &str, engine: &Engine, lines: &[&str]) -> Setup {
        self.standalone.push(server_lines(name, &engine.url(), lines));
        self
    }

    pub fn toml(&self) -> String {
        let mut text = format!("[runtime]\ncores = \"{}\"\n", self.cores);
        let section = |text: &mut String, title: &str, lines: &[String]| {
            if !lines.is_empty() {
                text.push_str(&format!("\n{title}\n"));
            }
            for line in lines {
                text.push_str(line);
                text.push('\n');
            }
        };
        for line in &self.runtime {
            text.push_str(&format!("{line}\n"));
        }
        let mut listener = vec!["address = \"127.0.0.1:0\"".to_owned()];
        for line in &self.listener {
            set(&mut listener, line);
        }
        section(&mut text, "[[listener]]", &listener);
        section(&mut text, "[admin]", &["address = \"127.0.0.1:0\"".to_owned()]);
        section(&mut text, "[limits]", &self.limits);
        section(&mut text, "[headers]", &self.headers);
        section(&mut text, "[health]", &self.health);
        section(&mut text, "[log]", &self.log);
        for (pool, servers) in &self.pools {
            section(&mut text, "[[pool]]", pool);
            for server in servers {
                section(&mut text, "[[pool.server]]", server);
            }
        }
        for server in &self.standalone {
            section(&mut text, "[[server]]", server);
        }
        text
    }

    /// Starts it and waits until every server takes requests.
    #[track_caller]
    pub fn start(self) -> Router {
        let names = self.server_names();
        let router = self.start_unready();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        router.wait_up(&names);
        router
    }

    /// Starts it and waits only for its `ready` line.
    #[track_caller]
    pub fn start_unready(self) -> Router {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = directory.path().join("ringway.toml");
        std::fs::write(&file, self.toml()).expect("a writable temporary directory");
        let mut router = Router::spawn(&["serve", "--config", file.to_str().expect("UTF-8 path")]);
        router.directory = Some(directory);
        router
    }

    fn server_names(&self) -> Vec<String> {
        let servers = self.pools.iter().flat_map(|(_, servers)| servers).chain(&self.standalone);
        servers.map(|lines| lines[0].split('"').nth(1).expect("name = \"…\"").to_owned()).collect()
    }
}

fn server_lines(name: &str, url: &str, lines: &[&str]) -> Vec<String> {
    let mut all = vec![format!("name = \"{name}\""), format!("url = \"{url}\"")];
    all.extend(lines.iter().map(|l| (*l).to_owned()));
    all
}

/// A command of the binary under test, without settings from this process's environment.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringway"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RINGWAY_") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    die_with_parent(&mut command);
    command
}

/// The child is killed when the thread that spawns it ends, however this process ends.
pub fn die_with_parent(command: &mut Command) {
    // SAFETY: prctl is async-signal-safe and touches no memory of this process.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs the binary to its end; panics, and kills it, when that takes longer than `limit`.
#[track_caller]
pub fn run_to_exit(args: &[&str], limit: Duration) -> Ended {
    let mut child = command(args).spawn().expect("the binary starts");
    let mut stdout = child.stdout.take().expect("piped");
    let mut stderr = child.stderr.take().expect("piped");
    let out = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stdout.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let err = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let start = now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("own child") {
            break Some(status);
        }
        if start.elapsed() > limit {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        super::time::pause(ms(5));
    };
    let (stdout, stderr) = (out.join().expect("reader"), err.join().expect("reader"));
    let status = status.unwrap_or_else(|| {
        panic!("{args:?} did not end within {limit:?}\nstdout: {stdout}\nstderr: {stderr}")
    });
    Ended { code: status.code(), stdout, stderr }
}

/// A running router.
pub struct Router {
    child: Child,
    http: SocketAddr,
    admin: SocketAddr,
    metrics: Option<SocketAddr>,
    stderr: Arc<Mutex<Vec<u8>>>,
    directory: Option<tempfile::TempDir>,
    ended: Option<Option<i32>>,
}

impl Router {
    /// Starts the binary with `args` and waits for its `ready` line.
    #[track_caller]
    pub fn spawn(args: &[&str]) -> Router {
        Router::spawn_as(args, "openai")
    }

    /// The same, whose one listener must have that profile.
    #[track_caller]
    pub fn spawn_as(args: &[&str], profile_expected: &str) -> Router {
        let mut child = command(args).spawn().expect("the binary starts");
        let stdout = child.stdout.take().expect("piped");
        let mut stderr_pipe = child.stderr.take().expect("piped");
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&stderr);
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = stderr_pipe.read(&mut piece) {
                log.lock().expect("no holder panics").extend_from_slice(&piece[..count]);
            }
        });
        let (lines, line) = mpsc::channel();
        std::thread::spawn(move || {
            for text in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = lines.send(text);
            }
        });
        let deadline = now() + seconds(15);
        let (mut http, mut admin, mut metrics) = (None, None, None);
        let mut seen = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(now());
            let Ok(text) = line.recv_timeout(left) else {
                let _ = child.kill();
                let status = child.wait();
                let log = String::from_utf8_lossy(&stderr.lock().expect("no holder panics")).into_owned();
                panic!("no `ready` from {args:?} (ended: {status:?})\nstdout: {seen:?}\nstderr:\n{log}");
            };
            if let Some(address) = text.strip_prefix("listening http ") {
                let (address, profile) = address.split_once(' ').expect("address, then profile");
                assert_eq!(profile.strip_prefix("profile="), Some(profile_expected), "in {text:?}");
                http = Some(address.parse().expect("a socket address"));
            } else if let Some(address) = text.strip_prefix("listening admin ") {
                admin = Some(address.parse().expect("a socket address"));
            } else if let Some(address) = text.strip_prefix("listening metrics ") {
                metrics = Some(address.parse().expect("a socket address"));
            } else if text == "ready" {
                break;
            }
            seen.push(text);
        }
        let http = http.unwrap_or_else(|| panic!("no `listening http` before `ready`: {seen:?}"));
        let admin = admin.unwrap_or_else(|| panic!("no `listening admin` before `ready`: {seen:?}"));
        Router { child, http, admin, metrics, stderr, directory: None, ended: None }
    }

    /// Its files live as long as it does.
    pub fn keep(&mut self, directory: tempfile::TempDir) {
        self.directory = Some(directory);
    }

    /// Where clients connect.
    pub fn http(&self) -> SocketAddr {
        self.http
    }
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }
    /// Of a listener that serves nothing but the metrics page.
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics.expect("a metrics listener")
    }
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    /// The directory that holds its configuration.
    pub fn directory(&self) -> &Path {
        self.directory.as_ref().expect("started from a configuration").path()
    }
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.stderr.lock().expect("no holder panics")).into_owned()
    }

    /// Its log, once that text is in it: a line that is written is not yet read here.
    #[track_caller]
    pub fn logged(&self, text: &str) -> String {
        eventually(seconds(5), &format!("{text:?} is logged"), || {
            let log = self.log();
            if log.contains(text) { Ok(log) } else { Err(log) }
        })
    }

    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.http)
    }
    /// One POST on its own connection.
    #[track_caller]
    pub fn post(&self, target: &str, body: &[u8]) -> Response {
        once(self.http, "POST", target, body)
    }
    #[track_caller]
    pub fn get(&self, target: &str) -> Response {
        once(self.http, "GET", target, b"")
    }
    #[track_caller]
    pub fn admin_get(&self, target: &str) -> Response {
        once(self.admin, "GET", target, b"")
    }

    /// A request to the admin listener, with a JSON body where there is one.
    #[track_caller]
    pub fn admin_ask(&self, method: &str, target: &str, body: &str) -> Response {
        let json = [("Content-Type", "application/json")];
        let headers = if body.is_empty() { &[][..] } else { &json[..] };
        Client::connect(self.admin).ask(method, target, headers, body.as_bytes())
    }
    /// Sets a server's weight while the router runs, and waits until every shard has heard of it.
    #[track_caller]
    pub fn set_weight(&self, name: &str, weight: &str) {
        let response = self.admin_ask(
            "PATCH",
            &format!("/admin/v1/servers/{name}"),
            &format!("{{\"weight\":{weight}}}"),
        );
        assert_eq!(response.status, 200, "PATCH weight of {name}: {}", response.text());
        self.settle();
    }

    #[track_caller]
    pub fn metrics(&self) -> Metrics {
        let response = self.admin_get("/metrics");
        assert_eq!(response.status, 200, "GET /metrics: {}", response.text());
        Metrics::parse(&response.text())
    }
    #[track_caller]
    pub fn state(&self) -> serde_json::Value {
        let response = self.admin_get("/admin/v1/state");
        assert_eq!(response.status, 200, "GET /admin/v1/state: {}", response.text());
        response.json()
    }
    /// One server's entry on the state page.
    #[track_caller]
    pub fn server_state(&self, name: &str) -> serde_json::Value {
        let state = self.state();
        find_server(&state, name).unwrap_or_else(|| panic!("no server {name} in {state:#}"))
    }

    /// Waits until each of `names` takes requests.
    #[track_caller]
    pub fn wait_up(&self, names: &[&str]) {
        eventually(seconds(10), "every server takes requests", || {
            let state = self.state();
            for name in names {
                let server =
                    find_server(&state, name).ok_or_else(|| format!("no server {name} in {state:#}"))?;
                if server["state"] != UP {
                    return Err(format!("{server:#}\nlog:\n{}", self.log()));
                }
            }
            Ok(())
        });
        self.settle();
    }

    /// The state page is the control thread's view; shards hear of a change some milliseconds later (their tick is 5 ms,
    /// 20 ms without connections), and nothing outside tells when each of them has.
    pub fn settle(&self) {
        super::time::pause(ms(50));
    }

    /// Waits until a server's state is not "up".
    #[track_caller]
    pub fn wait_not_up(&self, name: &str) {
        eventually(seconds(10), "the server takes no requests", || {
            let server = self.server_state(name);
            if server["state"] == UP { Err(format!("{server:#}")) } else { Ok(()) }
        });
        self.settle();
    }

    /// Waits until the sum of a metric over `labels` is `value`.
    #[track_caller]
    pub fn wait_metric(&self, name: &str, labels: &[(&str, &str)], value: f64, limit: Duration) {
        eventually(limit, &format!("{name}{labels:?} is {value}"), || {
            let metrics = self.metrics();
            let sum = metrics.sum(name, labels);
            if sum == value {
                return Ok(());
            }
            let lines: Vec<_> = metrics.text.lines().filter(|l| l.starts_with(name)).collect();
            Err(format!("{sum} in\n{}", lines.join("\n")))
        });
    }

    /// Waits until no request is in work or queued.
    #[track_caller]
    pub fn wait_idle(&self, limit: Duration) {
        self.wait_metric("ringway_in_flight", &[], 0.0, limit);
        self.wait_metric("ringway_queue_depth", &[], 0.0, limit);
    }

    /// A memory figure of the process in bytes: `VmRSS` now, `VmHWM` at most so far.
    pub fn memory_bytes(&self, figure: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("a live process");
        let line = status.lines().find(|l| l.starts_with(figure)).expect("a memory figure");
        let kib: u64 = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
        kib * 1024
    }
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("a live process").count()
    }

    pub fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.pid()).expect("process ids are positive");
        // SAFETY: sends a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "signal {signal} to the router");
    }

    /// Waits for its end; `None` when it still runs after `limit`.
    pub fn wait_exit(&mut self, limit: Duration) -> Option<i32> {
        let start = now();
        while start.elapsed() < limit {
            if let Some(status) = self.child.try_wait().expect("own child") {
                self.ended = Some(status.code());
                return Some(status.code().unwrap_or(-1));
            }
            super::time::pause(ms(3));
        }
        None
    }
}

fn find_server(state: &serde_json::Value, name: &str) -> Option<serde_json::Value> {
    let pools = state["pools"].as_array()?;
    pools
        .iter()
        .flat_map(|p| p["servers"].as_array().into_iter().flatten())
        .find(|s| s["name"] == name)
        .cloned()
}

impl Drop for Router {
    fn drop(&mut self) {
        let died = self.ended.is_none().then(|| self.child.try_wait().ok().flatten()).flatten();
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = self.log();
        if std::thread::panicking() {
            let from = log.char_indices().rev().nth(6000).map_or(0, |(at, _)| at);
            eprintln!("--- the router's log (end) ---\n{}", &log[from..]);
            return;
        }
        assert!(!log.contains("panicked at"), "the router panicked:\n{log}");
        assert!(died.is_none(), "the router ended by itself ({died:?}):\n{log}");
    }
}

/// A path for a Unix socket that no other test uses.
pub fn socket_path(name: &str) -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("ringway-{}-{number}-{name}.sock", std::process::id()))
}
