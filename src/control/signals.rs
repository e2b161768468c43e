//! Signals as events of the runtime: SIGTERM and SIGINT end the process, SIGHUP asks for a reload.
//!
//! The handler writes one byte to a socket pair that the runtime reads from: nothing polls. Register early, before the
//! shards start, so that a signal during the start is not lost: its byte waits in the pair.
//!
//! *Invariant*: the handler does one non-blocking `send`, which is safe in a signal handler. The descriptors belong to
//! this module until [`Signals`] is dropped, which takes the handlers down again.
//! *Errors*: those of making a socket pair and of `sigaction`.

use std::io;
use std::os::unix::net::UnixStream;

use monoio::io::AsyncReadRent;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::runtime;

/// The signals of this process, caught but not yet listened to.
#[derive(Debug)]
pub struct Signals {
    terminate: UnixStream,
    hangup: UnixStream,
    registered: Registered,
}

/// Takes the handlers down when it goes.
#[derive(Debug)]
struct Registered(Vec<SigId>);

impl Drop for Registered {
    fn drop(&mut self) {
        for id in &self.0 {
            signal_hook::low_level::unregister(*id);
        }
    }
}

/// The reading end of one kind of signal, inside the runtime.
#[derive(Debug)]
pub struct Bell {
    stream: monoio::net::UnixStream,
    buffer: Vec<u8>,
}

impl Signals {
    /// Catches SIGTERM, SIGINT and SIGHUP from now on.
    pub fn register() -> io::Result<Signals> {
        let (terminate, terminate_writer) = UnixStream::pair()?;
        let (hangup, hangup_writer) = UnixStream::pair()?;
        let mut registered = Registered(Vec::new());
        for (signal, writer) in
            [(SIGTERM, terminate_writer.try_clone()?), (SIGINT, terminate_writer), (SIGHUP, hangup_writer)]
        {
            registered.0.push(signal_hook::low_level::pipe::register(signal, writer)?);
        }
        Ok(Signals { terminate, hangup, registered })
    }

    /// Signals that a test sends by writing a byte: to the first stream to end, to the second to reload.
    #[cfg(test)]
    pub fn by_hand() -> (Signals, UnixStream, UnixStream) {
        let (terminate, end) = UnixStream::pair().unwrap();
        let (hangup, reload) = UnixStream::pair().unwrap();
        (Signals { terminate, hangup, registered: Registered(Vec::new()) }, end, reload)
    }

    /// Inside the runtime: the bells of "end" and of "reload", and a guard to keep as long as they are listened to.
    pub fn listen(self) -> io::Result<(Bell, Bell, impl Drop + use<>)> {
        Ok((Bell::new(self.terminate)?, Bell::new(self.hangup)?, self.registered))
    }
}

impl Bell {
    /// Listens to the reading end of a pair; every byte is one ring.
    pub fn new(stream: UnixStream) -> io::Result<Bell> {
        runtime::adapt(&stream)?;
        Ok(Bell { stream: monoio::net::UnixStream::from_std(stream)?, buffer: vec![0; 64] })
    }

    /// Waits; returns how often it rang since, at least once. An error means that it will never ring again.
    pub async fn ring(&mut self) -> io::Result<usize> {
        let (result, buffer) = self.stream.read(std::mem::take(&mut self.buffer)).await;
        self.buffer = buffer;
        match result? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            rings => Ok(rings),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;
    use std::time::Duration;

    fn raise(signal: i32) {
        signal_hook::low_level::raise(signal).unwrap();
    }

    /// One test for all, since handlers belong to the whole process.
    #[test]
    fn each_signal_rings_its_own_bell_once_on_both_drivers() {
        for uring in [true, false] {
            let signals = Signals::register().unwrap();
            raise(SIGTERM);
            runtime::block_on(uring, async move {
                let (mut terminate, mut hangup, _guard) = signals.listen().unwrap();
                assert_eq!(terminate.ring().await.unwrap(), 1, "a signal before the runtime is kept");
                let quiet = monoio::time::timeout(Duration::from_millis(30), terminate.ring()).await;
                assert!(quiet.is_err(), "nothing rings twice");
                // The read that was given up may have taken the buffer along.
                let mut terminate = Bell { buffer: vec![0; 64], ..terminate };
                let rung = Rc::new(std::cell::Cell::new(0));
                let counter = rung.clone();
                let listener = monoio::spawn(async move {
                    while counter.get() < 2 {
                        counter.set(counter.get() + terminate.ring().await.unwrap());
                    }
                });
                raise(SIGHUP);
                assert_eq!(hangup.ring().await.unwrap(), 1);
                assert_eq!(rung.get(), 0);
                raise(SIGINT);
                raise(SIGTERM);
                monoio::time::timeout(Duration::from_secs(5), listener).await.expect("both rang");
                assert_eq!(rung.get(), 2);
            })
            .unwrap();
        }
    }
}
