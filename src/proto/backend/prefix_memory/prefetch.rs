//! Asks the processor for a cache line that will be read soon, so that waits for memory overlap. What it does for a program is time
//! alone; where there is no such instruction it does nothing.
//!
//! *Bound and cost*: one instruction; an address outside the slice is allowed and costs the same.

#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn prefetch<T>(items: &[T], at: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    let line = items.as_ptr().wrapping_add(at);
    // SAFETY: the instruction reads nothing and faults at no address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn prefetch<T>(_items: &[T], _at: usize) {}
