//! Where and how threads run: affinity, real-time priority, timer slack, descriptor limit.
//!
//! *Errors*: what was asked for, what the system said, and what to do.

use std::io;

/// Priority used for `--fifo`; middling, below the kernel's own threads.
const FIFO_PRIORITY: i32 = 20;

/// Pins thread `tid` (0: the calling one) to `core`.
pub fn pin(tid: i32, core: usize) -> Result<(), String> {
    pin_raw(tid, core).map_err(|e| format!("pin to core {core}: {e} (is it among the allowed cores?)"))
}

/// As [`pin`], without allocating: may be called between fork and exec.
pub fn pin_raw(tid: i32, core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: an all-zero cpu_set_t is the empty set, and `core` is within it by the check above.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        set
    };
    // SAFETY: `set` is a valid set of the size given.
    match unsafe { libc::sched_setaffinity(tid, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Cores the calling thread may run on.
pub fn allowed_cores() -> Vec<usize> {
    // SAFETY: an all-zero cpu_set_t is valid, and is filled by the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect()
    }
}

/// Gives thread `tid` SCHED_FIFO (`on`) or the ordinary policy.
pub fn fifo(tid: i32, on: bool) -> Result<(), String> {
    let (policy, priority) = if on { (libc::SCHED_FIFO, FIFO_PRIORITY) } else { (libc::SCHED_OTHER, 0) };
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: `param` is valid for the call.
    match unsafe { libc::sched_setscheduler(tid, policy, &param) } {
        0 => Ok(()),
        _ => Err(format!(
            "scheduling policy of thread {tid}: {} (SCHED_FIFO needs CAP_SYS_NICE; leave --fifo out otherwise)",
            io::Error::last_os_error()
        )),
    }
}

/// Makes timed waits of the calling thread exact, instead of up to 50 us late.
pub fn exact_timers() {
    // SAFETY: PR_SET_TIMERSLACK takes one number; failure (old kernels) only leaves the default slack.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

/// Id of the calling thread.
pub fn thread_id() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::gettid() }
}

/// Sees to it that this process, and those it starts, may open `wanted` descriptors.
pub fn raise_descriptors(wanted: u64) -> Result<(), String> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the call to fill.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(format!("read RLIMIT_NOFILE: {}", io::Error::last_os_error()));
    }
    if limit.rlim_cur >= wanted {
        return Ok(());
    }
    let raised = libc::rlimit { rlim_cur: wanted, rlim_max: limit.rlim_max.max(wanted) };
    // SAFETY: `raised` is valid.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } {
        0 => Ok(()),
        _ => Err(format!(
            "{wanted} open descriptors are needed, {} allowed (hard limit {}): raise it with 'ulimit -n {wanted}'",
            limit.rlim_cur, limit.rlim_max
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_this_thread_and_refuses_a_core_that_is_not_there() {
        std::thread::spawn(|| {
            let core = *allowed_cores().last().expect("at least one");
            pin(0, core).expect("allowed");
            assert_eq!(allowed_cores(), [core]);
            assert!(pin(0, 100_000).expect_err("no such core").contains("core 100000"));
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn descriptors_below_the_limit_are_granted() {
        raise_descriptors(64).expect("below any default");
        assert!(raise_descriptors(u64::MAX - 1).expect_err("above any limit").contains("ulimit -n"));
    }
}
