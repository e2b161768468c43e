//! The control thread's own small runtime.
//!
//! io_uring with COOP_TASKRUN and SINGLE_ISSUER, without those flags on kernels that refuse them, and epoll where io_uring
//! is not allowed at all or not wanted.
//!
//! *Invariant*: built on the thread that runs it (SINGLE_ISSUER binds the ring to it).
//! *Errors*: only when not even epoll can be set up.

use std::future::Future;
use std::io;
use std::os::fd::AsFd;

use monoio::{IoUringDriver, LegacyDriver, RuntimeBuilder};

/// Submission entries: far more than the operations this thread has in flight, since monoio aborts on a full queue.
const ENTRIES: u32 = 1024;

/// Runs `main` to its end on a new runtime. `uring` false: epoll straight away.
pub fn block_on<F: Future>(uring: bool, main: F) -> io::Result<F::Output> {
    if uring && monoio::utils::detect_uring() {
        let mut flags = iou06::IoUring::builder();
        flags.setup_coop_taskrun().setup_single_issuer();
        for builder in [flags, iou06::IoUring::builder()] {
            let builder = RuntimeBuilder::<IoUringDriver>::new().with_entries(ENTRIES).uring_builder(builder);
            if let Ok(mut runtime) = builder.enable_timer().build() {
                return Ok(runtime.block_on(main));
            }
        }
    }
    let mut runtime = RuntimeBuilder::<LegacyDriver>::new().with_entries(ENTRIES).enable_timer().build()?;
    Ok(runtime.block_on(main))
}

/// Sets a descriptor's blocking mode to what the running driver needs: epoll must not block in the call, while io_uring
/// would answer "would block" instead of waiting. Call it inside the runtime, before the descriptor is handed over.
pub fn adapt(fd: &impl AsFd) -> io::Result<()> {
    socket2::SockRef::from(fd).set_nonblocking(monoio::utils::is_legacy())
}
