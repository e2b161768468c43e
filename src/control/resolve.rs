//! Host names to addresses, off the runtime: the system's resolver blocks, so it has threads of its own.
//!
//! *Invariant*: at most one question per server is under way, so the queues are bounded by the number of servers.
//! *Bound and cost*: [`THREADS`] threads, started with the first question; one slow name holds up one of them.
//! *Errors*: an answer carries the resolver's own error; a name without addresses is one too.

use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};

use crate::proto::ids::BackendId;

/// Names looked up at the same time.
pub const THREADS: usize = 4;

/// A name to look up for a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub backend: BackendId,
    pub host: Box<str>,
    pub port: u16,
}

/// What became of a [`Question`]: at least one address, in the resolver's order.
pub type Answer = (BackendId, io::Result<Vec<SocketAddr>>);

/// The asking side; dropping it ends the threads once they are done with what they have.
#[derive(Debug)]
pub struct Resolver {
    questions: mpsc::Sender<Question>,
    answers: mpsc::Receiver<Answer>,
    /// What the threads work with, until they are started.
    idle: Option<Work>,
}

/// A thread's ends of the queues.
#[derive(Clone, Debug)]
struct Work {
    questions: Arc<Mutex<mpsc::Receiver<Question>>>,
    answers: mpsc::Sender<Answer>,
    ringer: Arc<UnixStream>,
}

impl Resolver {
    /// The resolver, and the reading end of the pair that gets one byte per answer.
    pub fn new() -> io::Result<(Resolver, UnixStream)> {
        let (bell, ringer) = UnixStream::pair()?;
        ringer.set_nonblocking(true)?;
        let (ask, questions) = mpsc::channel();
        let (tell, answers) = mpsc::channel();
        let work =
            Work { questions: Arc::new(Mutex::new(questions)), answers: tell, ringer: Arc::new(ringer) };
        Ok((Resolver { questions: ask, answers, idle: Some(work) }, bell))
    }

    /// Sends a question. The caller keeps track of what it has asked.
    pub fn ask(&mut self, question: Question) -> io::Result<()> {
        if let Some(work) = self.idle.take() {
            for number in 0..THREADS {
                let work = work.clone();
                std::thread::Builder::new()
                    .name(format!("ringway-dns-{number}"))
                    .spawn(move || work.run())?;
            }
        }
        self.questions.send(question).map_err(|_| io::Error::other("the name resolver has ended"))
    }

    /// The next answer that is there, if any.
    pub fn answer(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }
}

impl Work {
    /// Answers questions until nobody can ask any more.
    fn run(&self) {
        loop {
            // The lock is held while waiting: whoever has it is the one to take the next question.
            let question = match self.questions.lock() {
                Ok(questions) => questions.recv(),
                Err(_) => return,
            };
            let Ok(question) = question else { return };
            let answer = look_up(&question.host, question.port);
            if self.answers.send((question.backend, answer)).is_err() {
                return;
            }
            // A full pair is fine: the reader has not yet read what makes it look at the answers.
            let _ = (&*self.ringer).write(&[1]);
        }
    }
}

fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn answers_ring_and_errors_are_answers() {
        let (mut resolver, mut bell) = Resolver::new().unwrap();
        let ask = |number, host: &str| Question { backend: BackendId(number), host: host.into(), port: 80 };
        // Literals need no name server; the last label is reserved never to exist (RFC 6761 section 6.4).
        for (number, host) in ["127.0.0.1", "::1", "no-such-host.invalid"].into_iter().enumerate() {
            resolver.ask(ask(number as u16, host)).unwrap();
        }
        let mut answers = Vec::new();
        while answers.len() < 3 {
            bell.read_exact(&mut [0; 1]).unwrap();
            while let Some(answer) = resolver.answer() {
                answers.push(answer);
            }
        }
        answers.sort_by_key(|(backend, _)| *backend);
        assert_eq!(answers[0].1.as_ref().unwrap(), &["127.0.0.1:80".parse().unwrap()]);
        assert_eq!(answers[1].1.as_ref().unwrap(), &["[::1]:80".parse().unwrap()]);
        assert!(answers[2].1.is_err());
    }
}
