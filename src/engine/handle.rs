//! Starting an engine, and the handle on a running one.
//!
//! The handle talks to the engine's thread over a socket pair, one line each way, so that a fault which closes the
//! listener can still be lifted. When the handle goes, the engine goes.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::EngineOptions;
use super::fault::{ARMED_MAX, Fault};
use super::metrics::Stats;
use super::server::{self, Engine};
use crate::cli::{EngineArgs, exit};
use crate::runtime;

/// Why an engine cannot start.
#[derive(Debug)]
pub enum EngineError {
    /// The options contradict themselves; in words.
    Options(String),
    Bind {
        address: SocketAddr,
        source: io::Error,
    },
    /// Neither io_uring nor epoll can be set up, or there is no thread.
    Runtime(io::Error),
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineError::Options(text) => f.write_str(text),
            EngineError::Bind { address, source } => {
                let remedy = match source.kind() {
                    io::ErrorKind::AddrInUse => "; choose another port, or 0 for a free one",
                    io::ErrorKind::PermissionDenied => "; choose a port from 1024 upwards",
                    io::ErrorKind::AddrNotAvailable => "; this host does not have that address",
                    _ => "",
                };
                write!(f, "cannot listen on {address}: {source}{remedy}")
            }
            EngineError::Runtime(source) => write!(f, "cannot set up the engine's I/O: {source}"),
        }
    }
}
impl std::error::Error for EngineError {}

/// A running engine. Dropping the handle stops the engine: its connections are closed where they stand.
#[derive(Debug)]
pub struct EngineHandle {
    addr: SocketAddr,
    commands: Mutex<BufReader<UnixStream>>,
    thread: Option<JoinHandle<()>>,
}

impl EngineHandle {
    /// Where the engine listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its base URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// What it has counted so far.
    pub fn stats(&self) -> Stats {
        let line = self.command("stats").expect("a running engine answers its handle");
        let value = serde_json::from_str(&line).expect("an engine writes its figures as JSON");
        Stats::from_json(&value)
    }

    /// Arms a fault written as on the command line, such as `die:after_events=3`. The error says what was expected.
    pub fn arm(&self, fault: &str) -> Result<(), String> {
        match self.command(&format!("arm {fault}")).map_err(|error| error.to_string())?.as_str() {
            "ok" => Ok(()),
            text => Err(text.to_owned()),
        }
    }

    /// Lifts all faults.
    pub fn clear_faults(&self) {
        self.command("clear").expect("a running engine answers its handle");
    }

    /// Stops the engine and waits for its thread: the listener and all connections are closed when this returns.
    pub fn stop(mut self) {
        self.end();
    }

    fn command(&self, line: &str) -> io::Result<String> {
        let mut commands = self.commands.lock().expect("no command panics while it holds the lock");
        commands.get_mut().write_all(format!("{line}\n").as_bytes())?;
        let mut answer = String::new();
        commands.read_line(&mut answer)?;
        Ok(answer.trim_end().to_owned())
    }

    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            let commands = self.commands.get_mut().expect("no command panics while it holds the lock");
            // A thread that has ended already has closed its end.
            let _ = commands.get_mut().write_all(b"stop\n");
            // Its panic was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.end();
    }
}

fn check(options: &EngineOptions) -> Result<(), EngineError> {
    let wrong = |text: &str| Err(EngineError::Options(text.to_owned()));
    if options.models.is_empty() || options.models.iter().any(String::is_empty) {
        return wrong("model: expected at least one name, none of them empty");
    }
    if options.block_tokens == 0 || options.kv_blocks == 0 || options.rates.slots == 0 {
        return wrong("block-tokens, kv-blocks and slots: expected at least 1 each");
    }
    if options.kv_blocks >= u32::MAX as usize {
        return wrong("kv-blocks: expected less than 4294967295");
    }
    if options.output_tokens == 0 || options.context_tokens_max < 2 {
        return wrong("output-tokens: expected at least 1; context-tokens: expected at least 2");
    }
    let kept = options.faults.iter().filter(|armed| !matches!(armed.fault, Fault::Refuse { .. })).count();
    if kept > ARMED_MAX {
        return Err(EngineError::Options(format!("fault: expected at most {ARMED_MAX}, got {kept}")));
    }
    Ok(())
}

/// Starts an engine on its own thread. When this returns it listens (or, told to by a fault, refuses).
#[expect(
    clippy::disallowed_methods,
    reason = "answers carry the time of day, which the process clock does not know"
)]
pub fn spawn(options: EngineOptions) -> Result<EngineHandle, EngineError> {
    check(&options)?;
    let address = options.listen;
    let listener = TcpListener::bind(address).map_err(|source| EngineError::Bind { address, source })?;
    let addr = listener.local_addr().map_err(EngineError::Runtime)?;
    let (ours, theirs) = UnixStream::pair().map_err(EngineError::Runtime)?;
    let started_at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (report, outcome) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new()
        .name(format!("engine-{}", addr.port()))
        .spawn(move || engine_thread(options, addr, started_at_s, listener, theirs, report))
        .map_err(EngineError::Runtime)?;
    match outcome.recv() {
        Ok(Ok(())) => {
            Ok(EngineHandle { addr, commands: Mutex::new(BufReader::new(ours)), thread: Some(thread) })
        }
        Ok(Err(source)) => Err(EngineError::Runtime(source)),
        Err(_) => Err(EngineError::Runtime(io::Error::other("the engine's thread ended before it listened"))),
    }
}

fn engine_thread(
    options: EngineOptions,
    addr: SocketAddr,
    started_at_s: u64,
    listener: TcpListener,
    commands: UnixStream,
    report: std::sync::mpsc::Sender<io::Result<()>>,
) {
    let refuses = options.faults.iter().any(|armed| matches!(armed.fault, Fault::Refuse { .. }));
    let listener = if refuses {
        drop(listener);
        None
    } else {
        Some(listener)
    };
    // The runtime belongs to the thread that builds it.
    let ran = runtime::block_on(true, async {
        let commands = runtime::adapt(&commands).and_then(|()| monoio::net::UnixStream::from_std(commands));
        match commands {
            Ok(commands) => {
                // The other end waits for exactly this.
                let _ = report.send(Ok(()));
                server::run(Engine::new(options, addr, started_at_s), listener, commands).await;
            }
            Err(source) => {
                let _ = report.send(Err(source));
            }
        }
    });
    if let Err(source) = ran {
        let _ = report.send(Err(source));
    }
}

/// `ringway engine`: runs one until SIGINT or SIGTERM, and says the exit code.
pub fn run(args: &EngineArgs) -> u8 {
    let options = match EngineOptions::from_args(args) {
        Ok(options) => options,
        Err(text) => {
            eprintln!("ringway engine: {text}");
            return exit::WRONG;
        }
    };
    let mut signals = match Signals::new([SIGINT, SIGTERM]) {
        Ok(signals) => signals,
        Err(source) => {
            eprintln!("ringway engine: cannot listen for signals: {source}");
            return exit::NOT_STARTED;
        }
    };
    let mut handle = match spawn(options) {
        Ok(handle) => handle,
        Err(EngineError::Options(text)) => {
            eprintln!("ringway engine: {text}");
            return exit::WRONG;
        }
        Err(error) => {
            eprintln!("ringway engine: {error}");
            return exit::NOT_STARTED;
        }
    };
    // A closed stdout is no reason to stop: the engine may have been started by a script that read enough.
    let _ = writeln!(io::stdout(), "listening engine {}\nready", handle.addr());
    let _ = io::stdout().flush();
    // A thread that dies must not leave the process waiting for a signal.
    let thread = handle.thread.take().expect("a handle fresh from spawn has its thread");
    let waiting = signals.handle();
    let watcher = std::thread::spawn(move || {
        let ended_well = thread.join().is_ok();
        waiting.close();
        ended_well
    });
    let signalled = signals.forever().next().is_some();
    if signalled {
        let stats = handle.stats();
        eprintln!(
            "ringway engine: {} requests, {} completed, {} aborted by clients",
            stats.requests, stats.completed, stats.aborted
        );
        let commands = handle.commands.get_mut().expect("no command panics while it holds the lock");
        let _ = commands.get_mut().write_all(b"stop\n");
    }
    if watcher.join().unwrap_or(false) { exit::DONE } else { exit::NOT_STARTED }
}
