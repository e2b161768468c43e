//! The bench's only clock: CLOCK_MONOTONIC in nanoseconds, the same number in every process of one machine, so that a
//! timestamp written by the backend can be compared with the generator's.
//!
//! *Cost*: one vDSO read, about 25 ns.

/// One millisecond, in nanoseconds.
pub const MS: u64 = 1_000_000;
/// One second, in nanoseconds.
pub const S: u64 = 1_000_000_000;

/// CLOCK_MONOTONIC now, in nanoseconds.
pub fn now_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CPU time used by the calling thread so far, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Seconds since the Unix epoch; for naming a record only.
pub fn unix_s() -> u64 {
    read(libc::CLOCK_REALTIME) / S
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid timespec for the call to fill.
    let rc = unsafe { libc::clock_gettime(clock, &mut ts) };
    assert_eq!(rc, 0, "the three clocks used here exist on every Linux");
    ts.tv_sec as u64 * S + ts.tv_nsec as u64
}

/// Sleeps for `ns` nanoseconds. Only the orchestrating thread sleeps; the generator waits in its ring.
#[expect(clippy::disallowed_methods, reason = "the orchestrating thread has nothing to do but wait")]
pub fn sleep_ns(ns: u64) {
    std::thread::sleep(std::time::Duration::from_nanos(ns));
}

/// `unix_s` as `YYYY-MM-DD` (UTC), by the days-to-civil algorithm of the proleptic Gregorian calendar.
pub fn date(unix_s: u64) -> String {
    let days = (unix_s / 86_400) as i64 + 719_468;
    let era = days.div_euclid(146_097);
    let doe = days.rem_euclid(146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_709_164_800), "2024-02-29");
        assert_eq!(date(1_735_689_599), "2024-12-31");
        assert_eq!(date(1_735_689_600), "2025-01-01");
    }

    #[test]
    fn clock_advances() {
        let a = now_ns();
        assert!(now_ns() >= a && a > 0);
    }
}
