//! The demo's router: this very executable as `ringway serve`, in a child process that cannot outlive the demo.
//!
//! *Invariant*: the child is told to end and waited for when [`Router`] goes, whichever way; should the demo be killed, the
//! kernel tells it.
//! *Errors*: text with the reason and what the router wrote last.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::client::Client;
use super::pause;

/// The router may take so long to listen, and so long to find its servers.
const START_MAX: Duration = Duration::from_secs(10);
const SERVERS_TRIES: u32 = 200;
/// Requests served in a row that show a router at work.
const PROBES: u32 = 16;
/// After SIGTERM, before SIGKILL.
const END_TRIES: u32 = 300;
/// Lines of the router's own log that are kept to explain a failure.
const LOG_LINES: usize = 12;

/// What the router wrote last.
type Log = Arc<Mutex<VecDeque<String>>>;

/// What the router is to be like; all else is as by default.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Requests that each server takes at once.
    pub max_concurrency: usize,
    pub algorithm: Option<&'static str>,
}

/// A running router.
#[derive(Debug)]
pub struct Router {
    child: Child,
    log: Log,
    /// Where clients connect.
    pub address: SocketAddr,
    pub admin: SocketAddr,
    /// A model that all servers serve.
    pub model: String,
}

impl Router {
    /// Starts a router over `backends` (name and URL) and waits until it has found them all.
    pub fn start(
        backends: &[(String, String)],
        options: Options,
        interrupted: &AtomicBool,
    ) -> Result<Router, String> {
        let program =
            std::env::current_exe().map_err(|error| format!("cannot find its own executable: {error}"))?;
        let mut command = Command::new(program);
        command.arg("serve");
        for (name, url) in backends {
            command.arg("--backend").arg(format!("{name}={url}"));
        }
        command.args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain-settle-ms", "0"]);
        command.arg("--max-concurrency").arg(options.max_concurrency.to_string());
        if let Some(algorithm) = options.algorithm {
            command.arg("--algorithm").arg(algorithm);
        }
        // The demo shows the defaults, whatever the environment sets for a router of one's own.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("RINGWAY_")) {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is the demo's to act on: it ends the router itself.
        command.process_group(0);
        // SAFETY: prctl is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(|error| format!("cannot start a process: {error}"))?;
        let log = keep_log(&mut child);
        let stdout = child.stdout.take().expect("piped above");
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut router = Router { child, log, address: nowhere, admin: nowhere, model: String::new() };
        let told = read_lines(stdout).and_then(|(address, admin)| {
            router.address = address;
            router.admin = admin;
            router.await_servers(backends.len(), interrupted)
        });
        match told {
            Ok(()) => Ok(router),
            Err(text) => {
                // Ended first, so that its last words are in.
                router.stop();
                Err(router.explain(&text))
            }
        }
    }

    /// `text`, and below it what the router wrote last.
    fn explain(&self, text: &str) -> String {
        // The log's thread may be a line behind a process that has just ended.
        pause(Duration::from_millis(20));
        let log = self.log.lock().expect("the log's thread does not panic");
        let said: Vec<&str> = log.iter().map(String::as_str).collect();
        if said.is_empty() {
            text.to_owned()
        } else {
            format!("{text}; it said last:\n  {}", said.join("\n  "))
        }
    }

    /// In words, where the router has ended by itself.
    pub fn ended(&mut self) -> Option<String> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(self.explain(&format!("it ended while it was needed ({status})"))),
            Err(error) => Some(format!("it cannot be watched: {error}")),
        }
    }

    fn await_servers(&mut self, count: usize, interrupted: &AtomicBool) -> Result<(), String> {
        let mut last = String::from("no answer from its admin listener");
        for _ in 0..SERVERS_TRIES {
            if interrupted.load(Ordering::Relaxed) {
                return Err("interrupted".into());
            }
            match self.models_served() {
                Ok(models) if models.len() == count => {
                    let mut shared =
                        models[0].iter().filter(|model| models.iter().all(|all| all.contains(model)));
                    match shared.next() {
                        Some(model) => self.model = model.clone(),
                        None => return Err(format!("the engines have no model in common: {models:?}")),
                    }
                    // Once more after a moment: what the first probes met while shards heard of the servers one by one has
                    // left the wheels uneven, and a few more turns make up for it.
                    let again = || {
                        pause(Duration::from_millis(25));
                        self.serves()
                    };
                    match self.serves().and_then(|()| again()) {
                        Ok(()) => return Ok(()),
                        Err(error) => last = error.to_string(),
                    }
                }
                Ok(models) => last = format!("{} of {count} are up", models.len()),
                Err(error) => last = error.to_string(),
            }
            pause(Duration::from_millis(25));
        }
        Err(format!("the router did not find its engines: {last}"))
    }

    /// What each server serves that is up and has said so.
    fn models_served(&self) -> io::Result<Vec<Vec<String>>> {
        let state = Client::connect(self.admin)?.get("/admin/v1/state")?.json()?;
        let servers = state["pools"][0]["servers"].as_array().map_or(&[][..], Vec::as_slice);
        let up = servers.iter().filter(|server| server["state"] == "up");
        let models = up.map(|server| {
            let models = server["models"].as_array().map_or(&[][..], Vec::as_slice);
            models.iter().filter_map(|model| model.as_str().map(str::to_owned)).collect::<Vec<_>>()
        });
        Ok(models.filter(|models| !models.is_empty()).collect())
    }

    /// Short requests, each on a connection of its own, are all passed on: every shard has heard of the servers, which takes
    /// it a moment longer than the admin listener. Engines tokenize without touching their caches; what exactly they answer
    /// does not matter.
    fn serves(&self) -> io::Result<()> {
        let body =
            serde_json::json!({"model": self.model, "prompt": "hello", "content": "hello"}).to_string();
        for _ in 0..PROBES {
            let answer = Client::connect(self.address)?.post("/tokenize", &body)?;
            if answer.head.field("x-lifeboat-server").is_none() {
                return Err(io::Error::other(format!("status {}: {}", answer.status(), answer.text())));
            }
        }
        Ok(())
    }

    /// Tells the router to end, and waits; kills it when it does not. Doing it twice does nothing.
    pub fn stop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // SAFETY: a plain system call; the child is ours and has not been waited for, so its id is still its own.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        for _ in 0..END_TRIES {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            pause(Duration::from_millis(10));
        }
        // Both fail only where the child has ended after all.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reads the child's stderr to its end, so that it never blocks on it, and keeps the last lines.
fn keep_log(child: &mut Child) -> Log {
    let log = Log::default();
    let stderr = child.stderr.take().expect("piped by the caller");
    let kept = log.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let mut kept = kept.lock().expect("no reader panics while it holds the lock");
            if kept.len() == LOG_LINES {
                kept.pop_front();
            }
            kept.push_back(line);
        }
    });
    log
}

/// Reads stdout up to `ready`; answers where the router listens for clients and for operators.
fn read_lines(stdout: impl io::Read + Send + 'static) -> Result<(SocketAddr, SocketAddr), String> {
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // The other end stops listening at `ready`; what comes later is read and dropped.
            let _ = send.send(line);
        }
    });
    let (mut http, mut admin) = (None, None);
    loop {
        let line = match lines.recv_timeout(START_MAX) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Err(format!("the router did not get ready within {} s", START_MAX.as_secs()));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err("the router ended before it was ready".into());
            }
        };
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some("listening"), Some("http"), Some(address)) => http = address.parse().ok(),
            (Some("listening"), Some("admin"), Some(address)) => admin = address.parse().ok(),
            (Some("ready"), ..) => {
                return match (http, admin) {
                    (Some(http), Some(admin)) => Ok((http, admin)),
                    _ => Err("the router did not say where it listens".into()),
                };
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_router_s_lines_are_read() {
        let text =
            "listening http 127.0.0.1:43121 profile=openai\nlistening admin 127.0.0.1:39001\nready\nmore\n";
        let told = read_lines(io::Cursor::new(text));
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(told, Ok((address("127.0.0.1:43121"), address("127.0.0.1:39001"))));
    }

    #[test]
    fn a_router_that_ends_early_is_told_apart() {
        let fault = read_lines(io::Cursor::new("listening http 127.0.0.1:1\n")).expect_err("not ready");
        assert!(fault.contains("ended before it was ready"), "{fault}");
        let fault = read_lines(io::Cursor::new("ready\n")).expect_err("no address");
        assert!(fault.contains("where it listens"), "{fault}");
    }
}
