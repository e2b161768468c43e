//! A shard: one pinned thread with its own ring, listeners, connections and copy of all that a decision needs.
//!
//! * [`listener`]: accepts, hands off. [`session`]: one client connection; the walk of a request.
//! * [`intake`] → [`asked`] → [`forward`] → [`attempt`] (→ [`upload`]) → [`relay`] ([`placed`]): body, server, answer. [`reply`]: answers of the router's own.
//! * [`client`], [`armed`], [`lazy_write`], [`socket`], [`deadline`], [`buffers`]: the ground they stand on. [`upstream`]: connections to servers.
//! * [`stargate`]: the same for trusted listeners. [`nap`], [`waits`]: how tasks wait. [`replay`]: bodies that may be sent again.
//! * [`memory`]: gives back what a burst took. [`state`]: what the tasks of a shard share. [`figures`]: what it counts.
//!
//! *Invariant*: a shard shares no memory with another but the mesh's rings; tasks never block the thread.
//! *Bound*: one task per client connection, which also drives the server's connection; for the shard itself two, one per listener
//! and two that spin, where that is asked for.

pub mod armed;
pub mod asked;
pub mod attempt;
pub mod buffers;
pub mod client;
pub mod deadline;
pub mod figures;
pub mod forward;
pub mod held;
pub mod intake;
pub mod lazy_write;
pub mod listener;
pub mod memory;
pub mod nap;
pub mod placed;
pub mod relay;
pub mod replay;
pub mod reply;
pub mod session;
pub mod socket;
pub mod spin;
pub mod stargate;
pub mod state;
pub mod truth;
pub mod upload;
pub mod upstream;
pub mod waits;

use std::net::TcpListener;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use socket::Socket;
use stargate::desk::StargateOptions;
use state::{SessionLimits, Shard};

use crate::clock::Clock;
use crate::limits::SHARD_TICK_MS;
use crate::mesh::ShardPort;
use crate::proto::backend::catalog::Catalog;
use crate::proto::config::Profile;
use crate::proto::dispatcher::{Dispatcher, DispatcherOptions};
use crate::proto::ids::ShardId;
use crate::proto::message::{Notice, Phase};
use crate::runtime::{Driver, Runtime, SHARD_ENTRIES};

/// Tick of a shard without requests: nothing but idle deadlines is due then. The next request ends it.
const IDLE_TICK_MS: u64 = 100;
/// How often idle server connections are looked at, and pools follow the load down.
const HOUSEKEEPING_MS: u64 = 500;

/// All that a shard's thread is started with.
pub struct ShardOptions {
    pub id: ShardId,
    pub shards: usize,
    /// The core to be pinned to.
    pub core: Option<usize>,
    pub driver: Driver,
    pub spin_us: u64,
    pub limits: SessionLimits,
    pub header_prefix: Box<str>,
    pub dispatcher: DispatcherOptions,
    pub catalog: Catalog,
    pub port: ShardPort,
    /// The same on every shard, in the same order, each with whose contract it follows.
    pub listeners: Vec<(TcpListener, Profile)>,
    pub clock: Clock,
    /// Where some listener is trusted.
    pub stargate: Option<StargateOptions>,
}

/// Runs a shard on the calling thread, for as long as the process lives. Says through its port how it started, or why it
/// could not.
pub fn run(mut options: ShardOptions) {
    if let Some(core) = options.core
        && !core_affinity::set_for_current(core_affinity::CoreId { id: core })
    {
        let text = format!(
            "cannot pin shard {} to core {core}; is it in this process's affinity mask?",
            options.id.0
        );
        options.port.notify(Notice::Failed { shard: options.id, text });
        return;
    }
    match Runtime::build(options.driver, SHARD_ENTRIES) {
        Ok((mut runtime, downgrade)) => {
            let io_uring = runtime.is_io_uring();
            options.port.notify(Notice::Started { io_uring, downgrade });
            runtime.block_on(main(options, !io_uring));
        }
        Err(error) => {
            let text = format!("shard {}: no I/O driver: {error}", options.id.0);
            options.port.notify(Notice::Failed { shard: options.id, text });
        }
    }
}

async fn main(options: ShardOptions, nonblocking: bool) {
    let wake_fd = options.port.wake_fd();
    let set = options.port.set_nonblocking(true);
    let dispatcher = Dispatcher::new(options.id, options.shards, options.dispatcher, options.catalog.clone());
    let shard = Rc::new(Shard::new(
        options.id,
        options.shards,
        options.clock,
        options.limits,
        &options.header_prefix,
        dispatcher,
        options.port,
        options.catalog,
        options.listeners.iter().map(|(_, profile)| *profile).collect(),
        options.stargate,
    ));
    // SAFETY: the descriptor stays open while the port, which the shard holds for good, lives.
    let wake = unsafe { BorrowedFd::borrow_raw(wake_fd) }.try_clone_to_owned().and_then(Socket::new);
    let wake = match (set, wake) {
        (Ok(()), Ok(wake)) => wake,
        (set, wake) => {
            let error = set.err().or(wake.err()).map_or(String::new(), |e| e.to_string());
            let text = format!("shard {}: no wake-up descriptor: {error}", shard.id.0);
            shard.notify(Notice::Failed { shard: shard.id, text });
            return;
        }
    };
    for (index, (listener, _)) in options.listeners.into_iter().enumerate() {
        monoio::spawn(listener::accept(shard.clone(), listener, index as u16, nonblocking));
    }
    if options.spin_us > 0 {
        spin::spawn(shard.clone(), options.spin_us);
    }
    monoio::spawn(listen_to_mesh(shard.clone(), wake));
    if shard.stargate.is_some() {
        monoio::spawn(stargate::desk::keep_appointments(shard.clone()));
    }
    keep_time(shard).await;
}

/// Takes in messages that somebody waits for as soon as they come.
async fn listen_to_mesh(shard: Rc<Shard>, wake: Socket) {
    loop {
        shard.port.borrow().arm();
        shard.read_clock();
        hear(&shard);
        if wake.readable().await.is_err() {
            return;
        }
        let mut count = 0u64;
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(wake.fd(), (&raw mut count).cast(), 8) };
    }
}

fn hear(shard: &Rc<Shard>) {
    shard.hear(|fd, listener| {
        // SAFETY: the shard that accepted this descriptor has given it up by sending it, once.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // That shard may run on another driver.
        if crate::runtime::adapt(&fd).is_ok() {
            listener::adopt(shard, fd, listener);
        }
    });
}

async fn keep_time(shard: Rc<Shard>) {
    let mut next_housekeeping = shard.now().plus_ms(HOUSEKEEPING_MS);
    loop {
        let unsaid = shard.stargate.as_ref().is_some_and(|stargate| stargate.router.borrow().needs_flush());
        let working = shard.figures.borrow().active > 0 || shard.unsettled.get() > 0 || unsaid;
        match working || shard.phase.get() >= Phase::Draining {
            true => monoio::time::sleep(Duration::from_millis(SHARD_TICK_MS)).await,
            false => shard.timekeeper.sleep(Duration::from_millis(IDLE_TICK_MS)).await,
        }
        shard.tick();
        hear(&shard);
        if shard.now() >= next_housekeeping {
            next_housekeeping = shard.now().plus_ms(HOUSEKEEPING_MS);
            shard.upstreams.prune(shard.now());
            shard.buffers.shrink();
            shard.memory.give_back();
        }
    }
}
