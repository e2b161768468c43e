//! The runtime of one thread: io_uring with the flags that matter where the kernel has them, epoll where io_uring is
//! not allowed.
//!
//! `COOP_TASKRUN` spares the interrupts by which completions would stop user code; `SINGLE_ISSUER` lets the kernel skip
//! locking. Not `DEFER_TASKRUN`: monoio 0.2.4 enters the ring without `GETEVENTS`, so that no completion is reaped while
//! any task is runnable.
//! *Errors*: falls back step by step and says why; fails only if even epoll cannot be had.

use std::future::Future;
use std::io;
use std::os::fd::AsFd;

use monoio::time::TimeDriver;
use monoio::{IoUringDriver, LegacyDriver, RuntimeBuilder};

/// Submission queue entries of a shard. monoio 0.2.4 gives up when a full queue stays full after a submit, so: plenty.
pub const SHARD_ENTRIES: u32 = 4096;
/// The same for a thread with little to do.
pub const SMALL_ENTRIES: u32 = 1024;

/// Which driver to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// io_uring, else epoll.
    Auto,
    IoUring,
    Epoll,
}

/// A runtime bound to the thread that built it.
pub enum Runtime {
    Uring(monoio::Runtime<TimeDriver<IoUringDriver>>),
    Epoll(monoio::Runtime<TimeDriver<LegacyDriver>>),
}

impl Runtime {
    /// Builds the best runtime that `driver` and the kernel allow. The text says why it is not the best one there is.
    pub fn build(driver: Driver, entries: u32) -> io::Result<(Runtime, Option<String>)> {
        let mut downgrade = None;
        if driver != Driver::Epoll {
            let mut flagged = iou06::IoUring::builder();
            flagged.setup_coop_taskrun().setup_single_issuer();
            match uring(flagged, entries) {
                Ok(runtime) => return Ok((Runtime::Uring(runtime), None)),
                Err(e) => downgrade = Some(format!("io_uring without COOP_TASKRUN and SINGLE_ISSUER: {e}")),
            }
            match uring(iou06::IoUring::builder(), entries) {
                Ok(runtime) => return Ok((Runtime::Uring(runtime), downgrade)),
                Err(e) if driver == Driver::IoUring => return Err(e),
                Err(e) => downgrade = Some(format!("epoll, because io_uring cannot be set up: {e}")),
            }
        }
        let runtime = RuntimeBuilder::<LegacyDriver>::new().with_entries(entries).enable_timer().build()?;
        Ok((Runtime::Epoll(runtime), downgrade))
    }

    pub fn is_io_uring(&self) -> bool {
        matches!(self, Runtime::Uring(_))
    }

    /// Runs `future` and all it spawns until it ends.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        match self {
            Runtime::Uring(runtime) => runtime.block_on(future),
            Runtime::Epoll(runtime) => runtime.block_on(future),
        }
    }
}

fn uring(builder: iou06::Builder, entries: u32) -> io::Result<monoio::Runtime<TimeDriver<IoUringDriver>>> {
    RuntimeBuilder::<IoUringDriver>::new().with_entries(entries).uring_builder(builder).enable_timer().build()
}

/// Runs `main` to its end on a small runtime of its own: io_uring where it can be had, unless `uring` is false.
pub fn block_on<F: Future>(uring: bool, main: F) -> io::Result<F::Output> {
    let driver = if uring { Driver::Auto } else { Driver::Epoll };
    let (mut runtime, _) = Runtime::build(driver, SMALL_ENTRIES)?;
    Ok(runtime.block_on(main))
}

/// Sets a descriptor's blocking mode to what the running driver needs: epoll must not block in the call, while io_uring
/// would answer "would block" instead of waiting. Call it inside the runtime, before the descriptor is handed over.
pub fn adapt(fd: &impl AsFd) -> io::Result<()> {
    socket2::SockRef::from(fd).set_nonblocking(monoio::utils::is_legacy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_drivers_run_a_timer() {
        for (driver, uring) in [(Driver::Auto, true), (Driver::IoUring, true), (Driver::Epoll, false)] {
            let (mut runtime, downgrade) = Runtime::build(driver, SMALL_ENTRIES).unwrap();
            assert_eq!(runtime.is_io_uring(), uring);
            assert_eq!(downgrade, None);
            runtime.block_on(async { monoio::time::sleep(std::time::Duration::from_millis(1)).await });
        }
    }
}
