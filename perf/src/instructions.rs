//! User-space instructions of threads, by the processor's own counter, where the machine offers it (virtual machines
//! often do not): a figure that a noisy neighbour does not change.
//!
//! *Invariant*: all threads given are counted or none; half a sum would be taken for a whole one.
//! *Source*: perf_event_open(2).

use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;

const TYPE_HARDWARE: u32 = 0;
const HARDWARE_INSTRUCTIONS: u64 = 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const ATTRIBUTES_LEN: usize = 64;
const FD_CLOEXEC: u64 = 1 << 3;

/// Open counters, one per thread.
#[derive(Debug)]
pub struct Instructions(Vec<File>);

impl Instructions {
    /// Counts for `threads` from now on. Error: why the machine does not.
    pub fn open(threads: &[i32]) -> Result<Instructions, String> {
        threads
            .iter()
            .map(|&tid| {
                open_counter(tid, TYPE_HARDWARE, HARDWARE_INSTRUCTIONS, EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR)
            })
            .collect::<Result<_, _>>()
            .map(Instructions)
    }

    /// Instructions since `open`, all threads together.
    pub fn read(&mut self) -> Option<u64> {
        self.0.iter_mut().map(read_counter).sum()
    }
}

fn open_counter(tid: i32, kind: u32, config: u64, flags: u64) -> Result<File, String> {
    // The first version of the structure, 64 bytes: type, size, config, sample period, sample type, read format, flags,
    // and three words that stay zero. Later kernels accept it as it is.
    let mut attributes = [0u64; ATTRIBUTES_LEN / 8];
    attributes[0] = u64::from(kind) | (ATTRIBUTES_LEN as u64) << 32;
    attributes[1] = config;
    attributes[5] = flags;
    // SAFETY: the structure is valid for its stated size; the other arguments are numbers.
    let fd =
        unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), tid, -1, -1, FD_CLOEXEC) };
    if fd < 0 {
        return Err(format!("perf_event_open: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

fn read_counter(file: &mut File) -> Option<u64> {
    let mut word = [0; 8];
    (file.read(&mut word).ok()? == 8).then(|| u64::from_ne_bytes(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hardware counters may be missing; the kernel's task clock never is, and goes through the same two functions.
    #[test]
    fn a_software_counter_counts_this_thread() {
        const TYPE_SOFTWARE: u32 = 1;
        const TASK_CLOCK: u64 = 1;
        let mut file = match open_counter(0, TYPE_SOFTWARE, TASK_CLOCK, 0) {
            Ok(file) => file,
            Err(why) => {
                // Not permitted here (perf_event_paranoid above 2, or seccomp): then the reason must say so.
                assert!(why.starts_with("perf_event_open: "), "{why}");
                return;
            }
        };
        let before = read_counter(&mut file).expect("eight bytes");
        let until = crate::clock::thread_cpu_ns() + 5_000_000;
        while crate::clock::thread_cpu_ns() < until {}
        let used = read_counter(&mut file).expect("eight bytes") - before;
        assert!((4_000_000..500_000_000).contains(&used), "{used} ns");
    }

    #[test]
    fn a_thread_that_is_not_there_is_an_error() {
        assert!(Instructions::open(&[i32::MAX]).is_err());
    }
}
