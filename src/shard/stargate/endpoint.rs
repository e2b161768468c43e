//! What a trusted listener is asked for, by method and path; and the filter of its list of models.
//!
//! *Invariant*: whole, exact paths only.
//! *Source*: the Stargate rules, section 4.1.

use crate::proto::http1::Method;

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// For a server.
    Proxied(Proxied),
    Models,
    DebugState,
    Healthz,
    Readyz,
    /// 405: the methods that there are.
    WrongMethod {
        allow: &'static str,
    },
    /// 404.
    Unknown,
}

/// What servers are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxied {
    ChatCompletions,
    Responses,
    Embeddings,
}

impl Proxied {
    /// Label in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Proxied::ChatCompletions => "chat_completions",
            Proxied::Responses => "responses",
            Proxied::Embeddings => "embeddings",
        }
    }
}

impl Endpoint {
    /// `path`: without its query.
    pub fn of(method: Method, path: &[u8]) -> Endpoint {
        let read = |endpoint| match method {
            Method::Get | Method::Head => endpoint,
            _ => Endpoint::WrongMethod { allow: "GET, HEAD" },
        };
        let sent = |proxied| match method {
            Method::Post => Endpoint::Proxied(proxied),
            _ => Endpoint::WrongMethod { allow: "POST" },
        };
        match path {
            b"/v1/chat/completions" => sent(Proxied::ChatCompletions),
            b"/v1/responses" => sent(Proxied::Responses),
            b"/v1/embeddings" => sent(Proxied::Embeddings),
            b"/v1/models" => read(Endpoint::Models),
            b"/debug/state" => read(Endpoint::DebugState),
            b"/healthz" => read(Endpoint::Healthz),
            b"/readyz" => read(Endpoint::Readyz),
            _ => Endpoint::Unknown,
        }
    }
}

/// The `model_ids` of a query (without its `?`), trimmed; empty: no filter. `None`: one of them is blank, or no text.
pub fn model_ids(query: &[u8]) -> Option<Vec<String>> {
    let mut ids = Vec::new();
    for pair in query.split(|&b| b == b'&').filter(|pair| !pair.is_empty()) {
        let at = memchr::memchr(b'=', pair).unwrap_or(pair.len());
        if decoded(&pair[..at]) != b"model_ids" {
            continue;
        }
        let value = decoded(pair.get(at + 1..).unwrap_or_default());
        let id = String::from_utf8(value).ok()?;
        let id = id.trim();
        if id.is_empty() {
            return None;
        }
        ids.push(id.to_owned());
    }
    Some(ids)
}

/// A name or value of a query as forms encode it: `+` is a space, `%XX` a byte. A `%` that is none of that stays.
fn decoded(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let digit = |place: usize| text.get(at + place).and_then(|&b| (b as char).to_digit(16));
        match (text[at], digit(1), digit(2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high << 4 | low) as u8);
                at += 2;
            }
            (b'+', ..) => out.push(b' '),
            (b, ..) => out.push(b),
        }
        at += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_exact_and_have_their_methods() {
        let of = Endpoint::of;
        assert_eq!(of(Method::Post, b"/v1/chat/completions"), Endpoint::Proxied(Proxied::ChatCompletions));
        assert_eq!(of(Method::Post, b"/v1/responses"), Endpoint::Proxied(Proxied::Responses));
        assert_eq!(of(Method::Post, b"/v1/embeddings"), Endpoint::Proxied(Proxied::Embeddings));
        assert_eq!(of(Method::Get, b"/v1/models"), Endpoint::Models);
        assert_eq!(of(Method::Get, b"/debug/state"), Endpoint::DebugState);
        assert_eq!(of(Method::Head, b"/healthz"), Endpoint::Healthz);
        assert_eq!(of(Method::Get, b"/readyz"), Endpoint::Readyz);
        for path in [&b"/v1/responses"[..], b"/v1/chat/completions", b"/v1/embeddings"] {
            assert_eq!(of(Method::Get, path), Endpoint::WrongMethod { allow: "POST" });
            assert_eq!(of(Method::Options, path), Endpoint::WrongMethod { allow: "POST" });
        }
        assert_eq!(of(Method::Post, b"/v1/models"), Endpoint::WrongMethod { allow: "GET, HEAD" });
        for path in [
            &b"/"[..],
            b"/v1/completions",
            b"/chat/completions",
            b"/v1/models/",
            b"/health",
            b"/V1/models",
            b"*",
        ] {
            assert_eq!(of(Method::Get, path), Endpoint::Unknown);
            assert_eq!(of(Method::Post, path), Endpoint::Unknown);
        }
    }

    #[test]
    fn filters_are_decoded_trimmed_and_never_blank() {
        let ids = |query: &str| model_ids(query.as_bytes());
        let some = |list: &[&str]| Some(list.iter().map(|id| id.to_string()).collect::<Vec<_>>());
        assert_eq!(ids(""), some(&[]));
        assert_eq!(ids("other=1&&x"), some(&[]));
        assert_eq!(ids("model_ids=%20b%20&model_ids=zz"), some(&["b", "zz"]));
        assert_eq!(ids("a=b&model%5Fids=org%2Fm+1&model_ids=%C3%A9%"), some(&["org/m 1", "é%"]));
        for blank in ["model_ids=", "model_ids", "model_ids=a&model_ids=%20", "model_ids=+", "model_ids=%FF"]
        {
            assert_eq!(ids(blank), None, "{blank}");
        }
    }
}
