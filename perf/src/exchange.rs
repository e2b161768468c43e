//! One blocking request and answer, whole: to see whether a peer is ready, and what exactly it answers.
//!
//! *Bound and cost*: not for timing; answers up to the body limit are collected.
//! *Errors*: as text, with the peer's address.

use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::time::Duration;

use crate::http::{self, Fault};
use crate::payload;

const TIMEOUT: Duration = Duration::from_secs(5);

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    pub status: u16,
    pub content_type: String,
    /// Decoded, with the send timestamps of events masked.
    pub body: Vec<u8>,
}

/// Sends `request` `count` times over one connection; the answers.
pub fn exchange(address: SocketAddrV4, request: &[u8], count: usize) -> Result<Vec<Whole>, String> {
    let at = |why: String| format!("{address}: {why}");
    let io = |what: &str, e: std::io::Error| format!("{address}: {what}: {e}");
    let mut stream = TcpStream::connect_timeout(&address.into(), TIMEOUT).map_err(|e| io("connect", e))?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(|e| io("set timeout", e))?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(|e| io("set timeout", e))?;
    let mut answers = Vec::new();
    for turn in 0..count {
        stream.write_all(request).map_err(|e| io("send", e))?;
        let mut bytes = Vec::new();
        let mut piece = vec![0; 64 * 1024];
        let mut read = |into: &mut Vec<u8>| -> Result<(), String> {
            let n = stream.read(&mut piece).map_err(|e| io("receive", e))?;
            if n == 0 {
                return Err(at(format!("closed within answer {turn}")));
            }
            into.extend_from_slice(&piece[..n]);
            Ok(())
        };
        let (head, length) = loop {
            match http::response_head(&bytes).map_err(|fault| at(fault.to_string()))? {
                Some((head, length)) if !(100..200).contains(&head.status) => break (head, length),
                Some((_, length)) => drop(bytes.drain(..length)),
                None => read(&mut bytes)?,
            }
        };
        let mut framing = head.framing;
        let mut rest = bytes.split_off(length);
        let mut body = Vec::new();
        loop {
            let (taken, done) = framing
                .feed(&rest, &mut |b| body.extend_from_slice(b))
                .map_err(|fault: Fault| at(fault.to_string()))?;
            if done && taken < rest.len() {
                return Err(at(Fault::Surplus.to_string()));
            }
            if done {
                break;
            }
            rest.clear();
            read(&mut rest)?;
        }
        payload::mask_times(&mut body);
        answers.push(Whole { status: head.status, content_type: head.content_type, body });
        if !head.keep_alive && turn + 1 < count {
            return Err(at(format!("does not keep the connection after answer {turn}")));
        }
    }
    Ok(answers)
}
