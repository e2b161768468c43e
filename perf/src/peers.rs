//! The proxies compared: how each is configured, started on its core, found ready, and stopped.
//!
//! All run one thread or worker on the same core, keep connections alive on both sides, reuse upstream connections, write
//! no access log, pass bodies on as they come, and go to the same two backends in turn. One configuration serves all
//! scenarios, as it would in use. Each setting that is not needed for that is there because the proxy measured better, or
//! no worse, with it: `option http-no-delay` (without it HAProxy holds events back by up to 160 ms), and nginx's buffering
//! off in both directions. A record's setup.md has the configurations word for word.
//!
//! *Invariant*: only one proxy exists at a time; it is gone, with all its descendants, when [`Peer`] is dropped.
//! *Errors*: what failed and the end of the proxy's own log.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::ValueEnum;
use serde::Serialize;

use crate::clock::{self, MS, S};
use crate::exchange::exchange;
use crate::{process, sched};

/// Time for a proxy to answer its first request well.
const READY_NS_MAX: u64 = 10 * S;
/// Requests that a backend may have at once, where a proxy keeps such a ceiling: enforced, and never reached.
const SERVER_CONCURRENCY: u32 = 1024;
/// Time between SIGTERM and SIGKILL.
const STOP_NS_MAX: u64 = 400 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
// In the order in which ratios are given: each over those behind it.
pub enum Kind {
    /// No proxy: the generator talks to one backend.
    Direct,
    /// Ringway with a kv-aware pool.
    RingwayKv,
    /// Ringway as it is: weighted round-robin.
    Ringway,
    Haproxy,
    Nginx,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Direct => "direct",
            Kind::RingwayKv => "ringway-kv",
            Kind::Ringway => "ringway",
            Kind::Haproxy => "haproxy",
            Kind::Nginx => "nginx",
        }
    }
}

/// What a proxy is started with.
#[derive(Clone, Debug)]
pub struct Setup {
    pub backends: Vec<SocketAddrV4>,
    pub core: usize,
    pub ringway: PathBuf,
    pub ringway_args: Vec<String>,
    /// For configuration, logs and temporary files.
    pub directory: PathBuf,
    /// Client connections it must be able to hold.
    pub connections: u32,
}

impl Setup {
    /// Descriptors a proxy may use: its clients, as many upstream connections as the loads ever need, and room.
    pub fn descriptors(&self) -> u64 {
        u64::from(self.connections) + 4096
    }
}

/// A running proxy, or none for [`Kind::Direct`].
#[derive(Debug)]
pub struct Peer {
    pub kind: Kind,
    pub address: SocketAddrV4,
    child: Option<Child>,
}

impl Peer {
    /// Starts it, and waits until it answers `request` with 200.
    pub fn start(kind: Kind, setup: &Setup, request: &[u8]) -> Result<Peer, String> {
        if kind == Kind::Direct {
            return Ok(Peer { kind, address: setup.backends[0], child: None });
        }
        fs::create_dir_all(&setup.directory).map_err(|e| format!("{}: {e}", setup.directory.display()))?;
        let address = free_port()?;
        let mut command = command(kind, setup, address)?;
        let log_path = setup.directory.join(format!("{}.log", kind.name()));
        let log = fs::File::create(&log_path).map_err(|e| format!("{}: {e}", log_path.display()))?;
        let log_too = log.try_clone().map_err(|e| format!("{}: {e}", log_path.display()))?;
        command.stdin(Stdio::null()).stdout(log).stderr(log_too).process_group(0);
        let core = setup.core;
        // SAFETY: only async-signal-safe calls (sched_setaffinity, prctl) and no allocation between fork and exec.
        unsafe {
            command.pre_exec(move || {
                sched::pin_raw(0, core)?;
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let program = command.get_program().to_owned();
        let child = command.spawn().map_err(|e| format!("start {}: {e}", Path::new(&program).display()))?;
        let mut peer = Peer { kind, address, child: Some(child) };
        peer.wait_ready(request, &log_path)?;
        Ok(peer)
    }

    fn wait_ready(&mut self, request: &[u8], log_path: &Path) -> Result<(), String> {
        let until_ns = clock::now_ns() + READY_NS_MAX;
        let fail = |what: String| {
            let log = fs::read_to_string(log_path).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(10).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            Err(format!("{}: {what}; its log ends:\n{}", self.kind.name(), tail.join("\n")))
        };
        loop {
            if let Some(Ok(Some(status))) = self.child.as_mut().map(Child::try_wait) {
                return fail(format!("ended at its start ({status})"));
            }
            let last = match exchange(self.address, request, 1) {
                Ok(answers) if answers[0].status == 200 => return Ok(()),
                Ok(answers) => {
                    format!(
                        "status {}: {}",
                        answers[0].status,
                        String::from_utf8_lossy(&answers[0].body).trim()
                    )
                }
                Err(why) => why,
            };
            if clock::now_ns() > until_ns {
                return fail(format!("not ready within {} s: {last}", READY_NS_MAX / S));
            }
            clock::sleep_ns(20 * MS);
        }
    }

    /// The proxy's processes; none for [`Kind::Direct`].
    pub fn pids(&self) -> Vec<i32> {
        self.child.as_ref().map(|child| process::tree(child.id() as i32)).unwrap_or_default()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        let group = -(child.id() as i32);
        // SAFETY: a signal to the process group that `start` made; the child has not been waited for, so its id is ours.
        unsafe { libc::kill(group, libc::SIGTERM) };
        let until_ns = clock::now_ns() + STOP_NS_MAX;
        while clock::now_ns() < until_ns && matches!(child.try_wait(), Ok(None)) {
            clock::sleep_ns(5 * MS);
        }
        // What is left of the group, workers included. When all are gone this finds nobody.
        // SAFETY: as above; a group id is not given anew while it has members, and is fresh if it has none.
        unsafe { libc::kill(group, libc::SIGKILL) };
        let _ = child.wait();
    }
}

fn free_port() -> Result<SocketAddrV4, String> {
    let any = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
    match TcpListener::bind(any).and_then(|listener| listener.local_addr()) {
        Ok(std::net::SocketAddr::V4(address)) => Ok(address),
        other => Err(format!("find a free port: {other:?}")),
    }
}

/// Where `kind`'s program is; `None` when it is not installed.
pub fn program(kind: Kind, ringway: &Path) -> Option<PathBuf> {
    match kind {
        Kind::Direct => Some(PathBuf::new()),
        Kind::Ringway | Kind::RingwayKv => ringway.is_file().then(|| ringway.to_owned()),
        Kind::Haproxy | Kind::Nginx => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path)
                .chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from))
                .map(|directory| directory.join(kind.name()))
                .find(|file| file.is_file())
        }
    }
}

/// What the program says its version is.
pub fn version(kind: Kind, ringway: &Path) -> String {
    let flag = match kind {
        Kind::Direct => return String::new(),
        Kind::Ringway | Kind::RingwayKv => "--version",
        Kind::Haproxy | Kind::Nginx => "-v",
    };
    let Some(program) = program(kind, ringway) else { return "not installed".into() };
    match Command::new(program).arg(flag).output() {
        Ok(output) => {
            let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
            String::from_utf8_lossy(&text).lines().next().unwrap_or("").trim().to_owned()
        }
        Err(e) => format!("unknown ({e})"),
    }
}

fn command(kind: Kind, setup: &Setup, address: SocketAddrV4) -> Result<Command, String> {
    let program = program(kind, &setup.ringway).ok_or_else(|| match kind {
        Kind::Ringway | Kind::RingwayKv => {
            format!("{}: no such file; build it with 'cargo build --release'", setup.ringway.display())
        }
        _ => format!("{} is not installed (Debian: apt-get install {})", kind.name(), kind.name()),
    })?;
    let mut command = Command::new(program);
    let write = |name: &str, text: String| {
        let path = setup.directory.join(name);
        fs::write(&path, text).map(|()| path.clone()).map_err(|e| format!("{}: {e}", path.display()))
    };
    match kind {
        Kind::Direct => unreachable!("there is nothing to start"),
        Kind::Ringway | Kind::RingwayKv => {
            command.args(ringway_arguments(kind, setup, address));
            // What the record says is all that it is told.
            for (name, _) in
                std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RINGWAY_"))
            {
                command.env_remove(name);
            }
        }
        Kind::Haproxy => {
            command.arg("-db").arg("-f").arg(write("haproxy.cfg", haproxy_config(setup, address))?);
        }
        Kind::Nginx => {
            command.arg("-p").arg(&setup.directory);
            command.arg("-c").arg(write("nginx.conf", nginx_config(setup, address))?);
        }
    }
    Ok(command)
}

/// How `kind` is configured, for the record.
pub fn configuration(kind: Kind, setup: &Setup) -> String {
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8080);
    match kind {
        Kind::Direct => String::new(),
        Kind::Ringway | Kind::RingwayKv => {
            format!("ringway {}\n", ringway_arguments(kind, setup, address).join(" "))
        }
        Kind::Haproxy => haproxy_config(setup, address),
        Kind::Nginx => nginx_config(setup, address),
    }
}

fn ringway_arguments(kind: Kind, setup: &Setup, address: SocketAddrV4) -> Vec<String> {
    let mut arguments: Vec<String> = [
        "serve",
        "--cores",
        &setup.core.to_string(),
        "--listen",
        &address.to_string(),
        "--admin",
        "127.0.0.1:0",
    ]
    .map(str::to_owned)
    .to_vec();
    for backend in &setup.backends {
        arguments.push("--backend".into());
        arguments.push(format!("http://{backend}"));
    }
    if !setup.ringway_args.iter().any(|argument| argument.starts_with("--max-concurrency")) {
        arguments.extend(["--max-concurrency".into(), SERVER_CONCURRENCY.to_string()]);
    }
    if kind == Kind::RingwayKv {
        arguments.extend(["--algorithm", "kv-aware"].map(str::to_owned));
    }
    arguments.extend(setup.ringway_args.iter().cloned());
    arguments
}

fn haproxy_config(setup: &Setup, address: SocketAddrV4) -> String {
    // ulimit-n without strict limits: HAProxy would ask for two descriptors per client, more than many systems allow and
    // more than these loads use.
    let (connections, descriptors) = (setup.connections + 1024, setup.descriptors());
    let mut config = format!(
        "global\n    nbthread 1\n    maxconn {connections}\n    ulimit-n {descriptors}\n    no strict-limits\n\ndefaults\n    mode http\n    http-reuse always\n    option http-no-delay\n    \
         timeout connect 2s\n    timeout client 600s\n    timeout server 600s\n    timeout http-keep-alive 600s\n    \
         timeout http-request 10s\n\nfrontend in\n    bind {address} backlog 4096\n    default_backend engines\n\n\
         backend engines\n    balance roundrobin\n"
    );
    for (i, backend) in setup.backends.iter().enumerate() {
        config.push_str(&format!(
            "    server s{i} {backend} pool-max-conn 1024 pool-purge-delay 600s maxconn {SERVER_CONCURRENCY}\n"
        ));
    }
    config
}

fn nginx_config(setup: &Setup, address: SocketAddrV4) -> String {
    // As root, workers would change to another user, who cannot write here.
    // SAFETY: no arguments, cannot fail.
    let user = if unsafe { libc::geteuid() } == 0 { "user root;\n" } else { "" };
    let descriptors = setup.descriptors();
    let servers: String =
        setup.backends.iter().map(|backend| format!("        server {backend};\n")).collect();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("    {name}_temp_path temp_{name};\n"))
        .collect();
    format!(
        "daemon off;\n{user}worker_processes 1;\nworker_rlimit_nofile {descriptors};\npid nginx.pid;\nerror_log stderr crit;\n\
         events {{\n    worker_connections {descriptors};\n    use epoll;\n    multi_accept on;\n}}\n\
         http {{\n    access_log off;\n    tcp_nodelay on;\n    server_tokens off;\n    keepalive_timeout 600s;\n    \
         keepalive_requests 1000000000;\n    client_max_body_size 0;\n{temporary}    \
         upstream engines {{\n{servers}        keepalive 256;\n        keepalive_requests 1000000000;\n        \
         keepalive_timeout 600s;\n    }}\n    server {{\n        listen {address} backlog=4096;\n        location / {{\n            \
         proxy_pass http://engines;\n            proxy_http_version 1.1;\n            proxy_set_header Connection \"\";\n            \
         proxy_read_timeout 600s;\n            proxy_buffering off;\n            \
         proxy_request_buffering off;\n        }}\n    }}\n}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup {
            backends: vec![
                "127.0.0.1:1001".parse().expect("address"),
                "127.0.0.1:1002".parse().expect("address"),
            ],
            core: 0,
            ringway: "/nowhere/ringway".into(),
            ringway_args: vec!["--spin-us".into(), "0".into()],
            directory: "/nowhere".into(),
            connections: 1000,
        }
    }

    #[test]
    fn every_proxy_knows_both_backends() {
        for kind in [Kind::Ringway, Kind::RingwayKv, Kind::Haproxy, Kind::Nginx] {
            let text = configuration(kind, &setup());
            assert!(text.contains("127.0.0.1:1001") && text.contains("127.0.0.1:1002"), "{text}");
        }
        let line = configuration(Kind::Ringway, &setup());
        assert!(line.trim_end().ends_with("--max-concurrency 1024 --spin-us 0"), "{line}");
        let own = Setup { ringway_args: vec!["--max-concurrency=7".into()], ..setup() };
        assert_eq!(configuration(Kind::Ringway, &own).matches("--max-concurrency").count(), 1);
    }

    #[test]
    fn the_two_ringways_differ_by_their_algorithm_alone() {
        let kv = configuration(Kind::RingwayKv, &setup());
        assert!(kv.contains(" --algorithm kv-aware"), "{kv}");
        assert_eq!(kv.replace(" --algorithm kv-aware", ""), configuration(Kind::Ringway, &setup()));
    }

    #[test]
    fn streams_are_not_held_back() {
        assert!(configuration(Kind::Nginx, &setup()).contains("proxy_buffering off"));
        assert!(configuration(Kind::Haproxy, &setup()).contains("http-no-delay"));
        let bodies = "proxy_request_buffering off";
        assert!(
            configuration(Kind::Nginx, &setup()).contains(bodies),
            "large bodies are passed on as they come"
        );
    }

    #[test]
    fn a_missing_program_says_how_to_get_it() {
        let error = Peer::start(Kind::Ringway, &Setup { directory: std::env::temp_dir(), ..setup() }, b"")
            .expect_err("nowhere");
        assert!(error.contains("cargo build --release"), "{error}");
    }
}
