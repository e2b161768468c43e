//! Answers of the router's own on a trusted listener.
//!
//! *Invariant*: the status alone says it, with an empty body, but for the JSON errors of the table. No answer here names a server.
//! *Source*: the Stargate rules, sections 3.4, 4.1 and 4.4.

use super::super::client::Client;
use super::super::intake::Intake;
use super::super::reply::{push_connection, push_number_line, push_status};
use super::super::session::{After, Desk};
use crate::proto::http1::Method;
use crate::proto::message::Phase;
use crate::proto::stargate::request::Refusal;

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub status: u16,
    /// `x-stargate-error-code`; empty: none.
    pub code: &'static str,
    /// JSON; empty: no body.
    pub body: Vec<u8>,
    /// Value of `Allow`; empty: none.
    pub allow: &'static str,
}

impl Answer {
    pub fn empty(status: u16) -> Answer {
        Answer { status, ..Answer::default() }
    }

    pub fn json(body: Vec<u8>) -> Answer {
        Answer { status: 200, body, ..Answer::default() }
    }

    fn error(status: u16, code: &'static str, message: &str) -> Answer {
        // Two fields in this order; the message is the only text that needs care.
        let mut body = b"{\"error\":".to_vec();
        body.extend_from_slice(serde_json::Value::from(message).to_string().as_bytes());
        body.extend_from_slice(b",\"code\":\"");
        body.extend_from_slice(code.as_bytes());
        body.extend_from_slice(b"\"}");
        Answer { status, code, body, ..Answer::default() }
    }

    /// What a client is told that gets no server.
    pub fn of(refusal: &Refusal) -> Answer {
        match refusal {
            Refusal::Method { code, message } => Answer::error(400, code, message),
            Refusal::AffinityKeyMissing => Answer::empty(400),
            Refusal::NoTarget => Answer::error(404, "no_eligible_candidates", "no eligible candidates"),
            Refusal::Unavailable => Answer::empty(503),
            Refusal::InputWork { .. } => {
                Answer::error(503, "input_work_limit_exceeded", "input work admission limit exceeded")
            }
        }
    }

    /// Its bytes. `close`: the connection ends after it.
    pub fn encode(&self, out: &mut Vec<u8>, close: bool, minor: u8, method: Method) {
        push_status(out, self.status);
        if !self.body.is_empty() {
            out.extend_from_slice(b"Content-Type: application/json\r\n");
        }
        push_number_line(out, b"Content-Length: ", self.body.len() as u64);
        for (name, value) in [(&b"x-stargate-error-code: "[..], self.code), (b"Allow: ", self.allow)] {
            if !value.is_empty() {
                out.extend_from_slice(name);
                out.extend_from_slice(value.as_bytes());
                out.extend_from_slice(b"\r\n");
            }
        }
        push_connection(out, close, minor);
        out.extend_from_slice(b"\r\n");
        if method != Method::Head {
            out.extend_from_slice(&self.body);
        }
    }
}

/// Sends an answer to a request whose body is in hand, whole or in part.
pub async fn send(client: &mut Client, desk: &Desk, intake: &mut Intake, answer: &Answer) -> After {
    let phase = client.shard.phase.get();
    let close = !intake.whole()
        || intake.torn
        || !desk.head.keep_alive
        || phase >= Phase::Draining
        || client.end().is_some();
    intake.finish(client, desk);
    // What was set for the request is over, and no stop cuts what says that the process stops.
    client.timer.clear_all();
    if phase >= Phase::Draining {
        client.timer.spare();
    }
    let mut out = client.shard.buffers.take(512 + answer.body.len());
    answer.encode(&mut out, close, desk.head.minor, desk.head.method);
    match (client.send(out).await, close) {
        (false, _) => After::Close,
        (true, true) => After::LingeringClose,
        (true, false) => After::Next,
    }
}

/// Answers what is no request; the connection ends.
pub async fn refuse_head(client: &mut Client, status: u16) -> After {
    let mut out = client.shard.buffers.take(512);
    Answer::empty(status).encode(&mut out, true, 1, Method::Get);
    client.send(out).await;
    After::LingeringClose
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(answer: &Answer, close: bool, method: Method) -> String {
        let mut out = Vec::new();
        answer.encode(&mut out, close, 1, method);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn refusals_are_told_as_the_table_has_them() {
        let empty = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        let json = |status: &str, code: &str, body: &str| {
            let length = body.len();
            format!(
                "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nx-stargate-error-code: {code}\r\n\r\n{body}"
            )
        };
        let limit = "input_work_limit_exceeded";
        let limit_body =
            r#"{"error":"input work admission limit exceeded","code":"input_work_limit_exceeded"}"#;
        let none_body = r#"{"error":"no eligible candidates","code":"no_eligible_candidates"}"#;
        let method = Refusal::Method { code: "invalid_value", message: "n = \"x\"".to_owned() };
        let table = [
            (
                method,
                json("400 Bad Request", "invalid_value", r#"{"error":"n = \"x\"","code":"invalid_value"}"#),
            ),
            (Refusal::AffinityKeyMissing, empty("400 Bad Request")),
            (Refusal::NoTarget, json("404 Not Found", "no_eligible_candidates", none_body)),
            (Refusal::Unavailable, empty("503 Service Unavailable")),
            (Refusal::InputWork { capacity: true }, json("503 Service Unavailable", limit, limit_body)),
            (Refusal::InputWork { capacity: false }, json("503 Service Unavailable", limit, limit_body)),
        ];
        for (refusal, told) in table {
            assert_eq!(text(&Answer::of(&refusal), false, Method::Post), told);
        }
    }

    #[test]
    fn a_close_is_said_and_head_has_no_body() {
        let allow = Answer { allow: "POST", ..Answer::empty(405) };
        let told = "HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\nAllow: POST\r\nConnection: close\r\n\r\n";
        assert_eq!(text(&allow, true, Method::Get), told);
        let models = Answer::json(b"{}".to_vec());
        assert!(text(&models, false, Method::Head).ends_with("Content-Length: 2\r\n\r\n"));
        assert!(text(&models, false, Method::Get).ends_with("Content-Length: 2\r\n\r\n{}"));
    }
}
