//! The generator's io_uring: multishot accept and receive over one ring of shared buffers, sends from the caller's memory.
//!
//! *Invariant*: a buffer belongs to the kernel from `recycle` until the completion that names it, and to the caller from
//! then until `recycle`. Memory handed to `send` and `connect` must stay where it is until the completion.
//! *Bound and cost*: [`BUFFERS`] receive buffers of [`BUFFER_BYTES`]; at most [`SUBMIT_BATCH`] operations are held back
//! before they go to the kernel, so that requests leave one after the other, as from independent clients, and not in one
//! long batch.
//! *Errors*: the system's, with what was attempted. A kernel without the features (before 6.1) is refused at once.

use std::net::SocketAddrV4;
use std::os::fd::RawFd;

use io_uring::types::{BufRingEntry, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::clock::S;

/// Receive buffers; a power of two.
const BUFFERS: u16 = 512;
/// Bytes in each.
pub const BUFFER_BYTES: usize = 32 * 1024;
const ENTRIES: u32 = 4096;
const SUBMIT_BATCH: u32 = 8;
const BUFFER_GROUP: u16 = 0;
const ENTER_GETEVENTS: u32 = 1;

/// Which kind of operation a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Accept,
    Recv,
    Send,
    Connect,
    Wake,
}

/// A finished operation (or one result of a multishot).
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub op: Op,
    pub slot: u32,
    /// Bytes, a descriptor, or a negated errno.
    pub result: i32,
    /// The multishot goes on.
    pub more: bool,
    /// The receive buffer that holds the bytes.
    pub buffer: Option<u16>,
}

pub struct Ring {
    ring: IoUring,
    buffers: Buffers,
    held: u32,
}

impl Ring {
    /// Makes the ring on the calling thread, which must be the only one to use it.
    pub fn new() -> Result<Ring, String> {
        let ring = IoUring::builder()
            .setup_cqsize(ENTRIES * 4)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(ENTRIES)
            .map_err(|e| format!("io_uring with SINGLE_ISSUER and DEFER_TASKRUN: {e} (needs Linux 6.1, not forbidden by seccomp)"))?;
        let mut buffers = Buffers::new()?;
        // SAFETY: the ring memory is page-aligned, has BUFFERS entries and is unmapped only after the io_uring is closed:
        // `ring` stands before `buffers` in the struct, and fields drop in order.
        unsafe { ring.submitter().register_buf_ring(buffers.entries as u64, BUFFERS, BUFFER_GROUP) }
            .map_err(|e| format!("io_uring buffer ring: {e} (needs Linux 5.19)"))?;
        for id in 0..BUFFERS {
            buffers.recycle(id);
        }
        Ok(Ring { ring, buffers, held: 0 })
    }

    fn push(&mut self, entry: squeue::Entry, op: Op, slot: u32) {
        let entry = entry.user_data(u64::from(slot) << 8 | op as u64);
        // SAFETY: what the entry points at outlives the operation; each caller below says why.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.submit();
        }
        self.held += 1;
        if self.held >= SUBMIT_BATCH {
            self.submit();
        }
    }

    fn submit(&mut self) {
        // An error here (EBUSY, EAGAIN, EINTR) leaves the entries queued; the next call takes them.
        if self.ring.submit().is_ok() {
            self.held = 0;
        }
    }

    /// Accepts on `listener` until the completion says `more: false`.
    pub fn accept(&mut self, listener: RawFd, slot: u32) {
        self.push(opcode::AcceptMulti::new(Fd(listener)).flags(libc::SOCK_CLOEXEC).build(), Op::Accept, slot);
    }

    /// Receives on `fd` into shared buffers until the completion says `more: false`.
    pub fn recv(&mut self, fd: RawFd, slot: u32) {
        self.push(opcode::RecvMulti::new(Fd(fd), BUFFER_GROUP).build(), Op::Recv, slot);
    }

    /// Sends `bytes` whole, as far as the kernel can (the count must still be checked).
    ///
    /// # Safety
    /// `bytes` must stay in place until the completion.
    pub unsafe fn send(&mut self, fd: RawFd, slot: u32, bytes: &[u8]) {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let entry =
            opcode::Send::new(Fd(fd), bytes.as_ptr(), length).flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL);
        self.push(entry.build(), Op::Send, slot);
    }

    /// Connects `fd`.
    ///
    /// # Safety
    /// `address` must stay in place until the completion.
    pub unsafe fn connect(&mut self, fd: RawFd, slot: u32, address: &libc::sockaddr_in) {
        let size = size_of::<libc::sockaddr_in>() as u32;
        let entry = opcode::Connect::new(Fd(fd), std::ptr::from_ref(address).cast(), size);
        self.push(entry.build(), Op::Connect, slot);
    }

    /// Reads the eventfd that wakes this thread once; `word` is static, so it stays in place.
    pub fn wake_on(&mut self, eventfd: RawFd, word: &'static mut u64) {
        self.push(opcode::Read::new(Fd(eventfd), std::ptr::from_mut(word).cast(), 8).build(), Op::Wake, 0);
    }

    /// Submits what is held and waits for a completion, at most `timeout_ns`.
    pub fn wait(&mut self, timeout_ns: u64) -> Result<(), String> {
        let time = Timespec::new().sec(timeout_ns / S).nsec((timeout_ns % S) as u32);
        match self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time)) {
            Ok(_) => {}
            Err(e) => match e.raw_os_error() {
                // Timed out, interrupted, or completions must be taken first: all mean "look at the queue".
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => {}
                _ => return Err(format!("io_uring wait: {e}")),
            },
        }
        self.held = 0;
        Ok(())
    }

    /// Submits what is held and takes in what has finished, without waiting.
    pub fn poll(&mut self) -> Result<(), String> {
        let queued = self.ring.submission().len() as u32;
        // SAFETY: no argument is passed, so there is nothing that must outlive the call.
        match unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, 0, ENTER_GETEVENTS, None) } {
            Ok(_) => {}
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EBUSY | libc::EAGAIN) => {}
                _ => return Err(format!("io_uring enter: {e}")),
            },
        }
        self.held = 0;
        Ok(())
    }

    /// Moves the finished operations into `into`.
    pub fn drain(&mut self, into: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
            let data = entry.user_data();
            let op = match data & 0xff {
                0 => Op::Accept,
                1 => Op::Recv,
                2 => Op::Send,
                3 => Op::Connect,
                4 => Op::Wake,
                other => unreachable!("no operation {other} is ever submitted"),
            };
            into.push(Completion {
                op,
                slot: (data >> 8) as u32,
                result: entry.result(),
                more: cqueue::more(entry.flags()),
                buffer: cqueue::buffer_select(entry.flags()),
            });
        }
    }

    /// The first `length` bytes of receive buffer `id`.
    pub fn received(&self, id: u16, length: usize) -> &[u8] {
        self.buffers.bytes(id, length)
    }

    /// Gives receive buffer `id` back to the kernel.
    pub fn recycle(&mut self, id: u16) {
        self.buffers.recycle(id);
    }
}

struct Buffers {
    entries: *mut BufRingEntry,
    memory: *mut u8,
    tail: u16,
}

impl Buffers {
    const RING_BYTES: usize = BUFFERS as usize * size_of::<BufRingEntry>();
    const MEMORY_BYTES: usize = BUFFERS as usize * BUFFER_BYTES;

    fn new() -> Result<Buffers, String> {
        Ok(Buffers { entries: map(Self::RING_BYTES)?.cast(), memory: map(Self::MEMORY_BYTES)?, tail: 0 })
    }

    fn bytes(&self, id: u16, length: usize) -> &[u8] {
        assert!(id < BUFFERS && length <= BUFFER_BYTES, "the kernel names buffers we gave it");
        // SAFETY: within the mapping by the assertion; the kernel has handed this buffer over and `recycle` needs `&mut`.
        unsafe { std::slice::from_raw_parts(self.memory.add(id as usize * BUFFER_BYTES), length) }
    }

    fn recycle(&mut self, id: u16) {
        assert!(id < BUFFERS, "the kernel names buffers we gave it");
        // SAFETY: the index is within the ring of BUFFERS entries; the entry is not visible to the kernel until the tail
        // is published below.
        unsafe {
            let entry = &mut *self.entries.add((self.tail % BUFFERS) as usize);
            entry.set_addr(self.memory.add(id as usize * BUFFER_BYTES) as u64);
            entry.set_len(BUFFER_BYTES as u32);
            entry.set_bid(id);
        }
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is the 16-bit word at byte 14 of the ring (the spare field of its first entry), 2-aligned; only
        // this thread writes it.
        let tail =
            unsafe { std::sync::atomic::AtomicU16::from_ptr(self.entries.cast::<u8>().add(14).cast()) };
        tail.store(self.tail, std::sync::atomic::Ordering::Release);
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: both were mapped with these lengths, and the io_uring that used them is closed (field order in `Ring`).
        unsafe {
            libc::munmap(self.entries.cast(), Self::RING_BYTES);
            libc::munmap(self.memory.cast(), Self::MEMORY_BYTES);
        }
    }
}

fn map(length: usize) -> Result<*mut u8, String> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh anonymous mapping; no existing memory is touched.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(format!("mmap of {length} bytes: {}", std::io::Error::last_os_error()));
    }
    Ok(memory.cast())
}

/// `address` as the kernel wants it.
pub fn sockaddr(address: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}
