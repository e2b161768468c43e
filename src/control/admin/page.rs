//! What the admin listener answers to each path.

use serde_json::{Value, json};

use std::rc::Rc;

use super::show::state_json;
use super::{BODY_BYTES_MAX, Face, REPORT_WAIT_MS, Shared, registrations, servers};
use crate::control::metrics::{Format, render};
use crate::control::port::Port;
use crate::limits::REGISTRATION_BYTES_MAX;
use crate::proto::http1::{Method, RequestHead};

/// What stands behind a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Index,
    Health,
    Liveness,
    Readiness,
    Metrics,
    State,
    Config,
    /// `/admin/v1/servers/{name}`
    Server,
    /// `/admin/v1/servers/{name}/drain`
    Drain,
    /// `/v1/registrations/{id}`
    Registration,
    /// Known, and not in this version.
    Later,
}

const GET: &[Method] = &[Method::Get, Method::Head];

/// The room of a path and the methods that it takes; `None`: there is no such path.
fn find(path: &str) -> Option<(Room, &'static [Method])> {
    Some(match path {
        "/" => (Room::Index, GET),
        "/health" => (Room::Health, GET),
        "/liveness" => (Room::Liveness, GET),
        "/readiness" => (Room::Readiness, GET),
        "/metrics" => (Room::Metrics, GET),
        "/admin/v1/state" => (Room::State, GET),
        "/admin/v1/config" => (Room::Config, GET),
        "/admin/v1/reload" | "/admin/v1/servers" => (Room::Later, &[Method::Post]),
        _ => match path.strip_prefix("/admin/v1/servers/").map(|rest| rest.split_once('/')) {
            Some(Some((name, "drain"))) if !name.is_empty() => (Room::Drain, &[Method::Post]),
            Some(None) if path != "/admin/v1/servers/" => (Room::Server, &[Method::Patch, Method::Delete]),
            _ => match path.strip_prefix("/v1/registrations/") {
                Some(id) if !id.is_empty() && !id.contains('/') => {
                    (Room::Registration, &[Method::Put, Method::Delete])
                }
                _ => return None,
            },
        },
    })
}

const fn method_name(method: Method) -> &'static str {
    match method {
        Method::Get => "GET",
        Method::Head => "HEAD",
        Method::Post => "POST",
        Method::Put => "PUT",
        Method::Patch => "PATCH",
        Method::Delete => "DELETE",
        Method::Options => "OPTIONS",
        Method::Trace => "TRACE",
        Method::Other => "",
    }
}

const INDEX: &str = concat!(
    "Ringway ",
    env!("CARGO_PKG_VERSION"),
    ", admin listener

GET /health             200 while this process answers
GET /liveness           200 while this process answers
GET /readiness          200 while requests can be routed, else 503
GET /metrics            figures for Prometheus
GET /admin/v1/state     pools, servers, shards, as JSON
GET /admin/v1/config    effective configuration, as JSON (or TOML, if accepted)

PATCH /admin/v1/servers/NAME         {\"weight\":0} and max_concurrency, max_input_tokens, routing_tier; answers its new state
POST  /admin/v1/servers/NAME/drain   weight 0; answers when nothing runs on it any more, or after ?timeout_ms=N

PUT    /v1/registrations/ID          {\"url\",\"models\":{\"MODEL\":{\"status\":\"active\",\"stats\":{}}}} and cluster_id, routing_key, ttl_ms, lease;
                                     a server for Stargate listeners; answers {\"lease\",\"ttl_ms\",\"expires_at_unix_ms\"}
DELETE /v1/registrations/ID          ends it; ?lease=LEASE: only if that is its lease
"
);

/// A complete answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    /// Value of the Allow field, for 405.
    pub allow: Option<String>,
    pub body: Vec<u8>,
}

impl Answer {
    pub(super) fn json(status: u16, value: &Value) -> Answer {
        let body = format!("{value}\n").into_bytes();
        Answer { status, content_type: "application/json", allow: None, body }
    }

    fn text(content_type: &'static str, body: impl Into<Vec<u8>>) -> Answer {
        Answer { status: 200, content_type, allow: None, body: body.into() }
    }

    /// `{"error":{"message","type","code","param"}}`.
    pub fn error(status: u16, code: &str, message: &str) -> Answer {
        let kind = if status < 500 { "invalid_request_error" } else { "service_unavailable" };
        Answer::json(
            status,
            &json!({"error": {"message": message, "type": kind, "code": code, "param": null}}),
        )
    }

    /// The bytes of the answer to a request with `method`.
    pub fn encode(&self, method: Method, keep_alive: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            409 => "Conflict",
            414 => "URI Too Long",
            413 => "Content Too Large",
            431 => "Request Header Fields Too Large",
            500 => "Internal Server Error",
            501 => "Not Implemented",
            503 => "Service Unavailable",
            _ => "",
        };
        let mut bytes = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\n",
            self.status,
            self.content_type,
            self.body.len()
        )
        .into_bytes();
        if let Some(allow) = &self.allow {
            bytes.extend_from_slice(format!("Allow: {allow}\r\n").as_bytes());
        }
        // Said in both cases, so that HTTP/1.0 clients know too.
        bytes.extend_from_slice(match keep_alive {
            true => b"Connection: keep-alive\r\n\r\n".as_slice(),
            false => b"Connection: close\r\n\r\n".as_slice(),
        });
        if method != Method::Head {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

/// How large a body may be on which the answer to a request depends; `None`: it does not depend on one.
pub(super) fn body_bytes_max(head: &RequestHead, buf: &[u8]) -> Option<usize> {
    let path = String::from_utf8_lossy(head.path(buf));
    let room = find(&path).filter(|(_, methods)| methods.contains(&head.method)).map(|(room, _)| room);
    match (room, head.method) {
        (Some(Room::Server), Method::Patch) | (Some(Room::Drain), _) => Some(BODY_BYTES_MAX),
        (Some(Room::Registration), Method::Put) => Some(REGISTRATION_BYTES_MAX),
        _ => None,
    }
}

/// A browser says which page's script sent a request. Pages of others may not change anything here, and a reader of pages
/// on this host is who could be made to.
fn foreign_origin(head: &RequestHead, buf: &[u8]) -> bool {
    let Some(origin) = head.named(buf, b"origin").map(|span| span.of(buf)) else { return false };
    let host = head.host.map_or(&b""[..], |span| span.of(buf));
    // A name of somebody else's may have been pointed at this host: only what is certainly this host's own counts.
    !origin.strip_prefix(b"http://").is_some_and(|of| of.eq_ignore_ascii_case(host) && is_own_name(of))
}

/// An address, or `localhost`, with or without a port.
fn is_own_name(authority: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(authority) else { return false };
    let host = match text.strip_prefix('[').and_then(|v6| v6.split_once(']')) {
        Some((v6, _)) => v6,
        None => text.split_once(':').map_or(text, |(host, _)| host),
    };
    host.eq_ignore_ascii_case("localhost") || host.parse::<std::net::IpAddr>().is_ok()
}

/// Answers one request; `buf` is what its head was parsed from, `body` what [`body_bytes_max`] asked for.
pub(super) async fn answer<P: Port + 'static>(
    shared: &Rc<Shared<P>>,
    face: Face,
    head: &RequestHead,
    buf: &[u8],
    body: &[u8],
) -> Answer {
    let path = String::from_utf8_lossy(head.path(buf));
    let Some((room, methods)) = find(&path).filter(|(room, _)| face == Face::Admin || *room == Room::Metrics)
    else {
        let there = match face {
            Face::Admin => "no such path; GET / lists what is there",
            Face::Metrics => "no such path; there is /metrics",
        };
        return Answer::error(404, "not_found", there);
    };
    if !methods.contains(&head.method) {
        let allow = methods.iter().map(|method| method_name(*method)).collect::<Vec<_>>().join(", ");
        let mut answer = Answer::error(405, "method_not_allowed", &format!("this path takes {allow}"));
        answer.allow = Some(allow);
        return answer;
    }
    if !GET.contains(&head.method) && foreign_origin(head, buf) {
        return Answer::error(403, "foreign_origin", "a page of another origin may not change anything here");
    }
    match room {
        Room::Index => Answer::text("text/plain; charset=utf-8", INDEX),
        Room::Health | Room::Liveness => Answer::json(200, &json!({"status": "ok"})),
        Room::Readiness => {
            let (ready, draining) = (shared.state.borrow().ready(), shared.draining());
            match (ready, draining) {
                (true, _) => Answer::json(200, &json!({"status": "ready"})),
                (false, true) => {
                    Answer::json(503, &json!({"status": "not_ready", "reason": "shutting_down"}))
                }
                (false, false) => {
                    Answer::json(503, &json!({"status": "not_ready", "reason": "no_routable_server"}))
                }
            }
        }
        Room::Metrics => {
            let accept = head.named(buf, b"accept").map(|span| span.of(buf).to_vec());
            let format = Format::accepted(accept.as_deref());
            let figures = shared.fresh_figures(REPORT_WAIT_MS).await;
            let prefix = shared.options.trusted.is_some().then(|| &*shared.options.metrics_prefix);
            Answer::text(format.content_type(), render(figures, prefix, format))
        }
        Room::State => {
            let figures = shared.fresh_figures(REPORT_WAIT_MS).await;
            let uptime_s = shared.clock.now().0 as f64 / 1e9;
            let state = shared.state.borrow();
            let registrations = registrations::list(&figures, &state, shared.clock.now());
            Answer::json(200, &state_json(&figures, state.shards(), state.phase(), registrations, uptime_s))
        }
        Room::Config => {
            let accept = head.named(buf, b"accept").map(|span| span.of(buf));
            config(&shared.options.config_text, accept == Some(b"application/toml"))
        }
        Room::Registration if head.method == Method::Put => registrations::put(shared, &path, body).await,
        Room::Registration => {
            let whole = String::from_utf8_lossy(head.path_and_query.of(buf));
            let query = whole.split_once('?').map_or("", |(_, query)| query);
            registrations::delete(shared, &path, query).await
        }
        Room::Server if head.method == Method::Patch => servers::patch(shared, &path, body).await,
        Room::Drain => {
            let whole = String::from_utf8_lossy(head.path_and_query.of(buf));
            let query = whole.split_once('?').map_or("", |(_, query)| query);
            servers::drain(shared, &path, query, body).await
        }
        Room::Server | Room::Later => Answer::error(501, "not_implemented", "not in this version"),
    }
}

/// The effective configuration: JSON, or the file's own format for those who ask for it.
fn config(text: &str, as_toml: bool) -> Answer {
    if as_toml {
        return Answer::text("application/toml", text);
    }
    match text.parse::<toml::Table>().map(serde_json::to_value) {
        Ok(Ok(value)) => Answer::json(200, &value),
        _ => Answer::error(500, "internal", "the effective configuration cannot be shown as JSON"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_of_the_admin_api_is_known_with_its_methods() {
        let later = |path| match find(path) {
            Some((Room::Later, methods)) => {
                methods.iter().map(|m| method_name(*m)).collect::<Vec<_>>().join(" ")
            }
            other => panic!("{path}: {other:?}"),
        };
        assert_eq!(
            find("/admin/v1/servers/gpu0"),
            Some((Room::Server, &[Method::Patch, Method::Delete][..]))
        );
        assert_eq!(find("/admin/v1/servers/gpu0/drain"), Some((Room::Drain, &[Method::Post][..])));
        assert_eq!(later("/admin/v1/servers"), "POST");
        assert_eq!(later("/admin/v1/reload"), "POST");
        assert_eq!(
            find("/v1/registrations/r1"),
            Some((Room::Registration, &[Method::Put, Method::Delete][..]))
        );
        for path in
            ["/", "/health", "/liveness", "/readiness", "/metrics", "/admin/v1/state", "/admin/v1/config"]
        {
            assert_eq!(find(path).unwrap().1, GET, "{path}");
        }
        for path in [
            "",
            "/x",
            "/metrics/",
            "/admin",
            "/admin/v1/servers/",
            "/admin/v1/servers/a/b",
            "/admin/v1/servers//drain",
            "/v1/registrations/",
            "/v1/registrations/a/b",
            "/v1/models",
        ] {
            assert_eq!(find(path), None, "{path}");
        }
    }

    #[test]
    fn an_answer_to_head_has_the_length_and_no_body() {
        let answer = Answer::error(404, "not_found", "a \"quoted\" message");
        let whole = String::from_utf8(answer.encode(Method::Get, true)).unwrap();
        let (head, body) = whole.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 404 Not Found\r\n"));
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
        assert!(head.ends_with("\r\nConnection: keep-alive"));
        let value: Value = serde_json::from_str(body).unwrap();
        assert_eq!(value["error"]["code"], "not_found");
        let head_only = String::from_utf8(answer.encode(Method::Head, false)).unwrap();
        assert!(head_only.ends_with("\r\nConnection: close\r\n\r\n"));
        assert!(head_only.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
    }
}
