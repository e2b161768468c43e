//! Time as the shards count it: nanoseconds since the process started.
//!
//! *Invariant*: `Clock::now` is the only reader of a clock in the crate (clippy refuses others); pure code takes `now`
//! as an argument.
//! *Cost*: one vDSO read, about 25 ns.

/// A point in time, in nanoseconds since the process's [`Clock`] was made. Ordered; never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Later than any time met: "no deadline".
    pub const NEVER: Nanos = Nanos(u64::MAX);
    pub const ZERO: Nanos = Nanos(0);

    /// `ms` whole milliseconds as a span.
    pub const fn from_ms(ms: u64) -> Nanos {
        Nanos(ms.saturating_mul(1_000_000))
    }

    /// This time plus `ms` milliseconds; saturates at [`Nanos::NEVER`].
    pub const fn plus_ms(self, ms: u64) -> Nanos {
        Nanos(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }

    /// Time passed since `earlier`, in nanoseconds; 0 when `earlier` is later.
    pub const fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Reads the clock. Copies of one `Clock` agree, on every thread.
#[cfg(feature = "io")]
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: std::time::Instant,
}

#[cfg(feature = "io")]
impl Clock {
    /// A clock whose zero is now. Make one per process and hand out copies.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    #[expect(clippy::new_without_default, reason = "a default would hide that the clock is read here")]
    pub fn new() -> Self {
        Clock { start: std::time::Instant::now() }
    }

    /// Nanoseconds since this clock was made.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn now(&self) -> Nanos {
        Nanos(std::time::Instant::now().duration_since(self.start).as_nanos() as u64)
    }

    /// Milliseconds since 1970, for other processes to read; may go back. 0 where the host's clock stands before that.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn unix_ms(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}
