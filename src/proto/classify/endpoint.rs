//! Which API an endpoint belongs to, from method and path alone.
//!
//! Only whole, exact paths have a meaning, the common ones with or without the `/v1` in front; everything else is [`Endpoint::Other`] and
//! forwarded all the same.
//!
//! *Bound and cost*: a few compares of short strings; no allocation.
//! *Errors*: none.
//! *Source*: the OpenAI and Anthropic API references; Jina's and Cohere's for rerank; SGLang's for generate.

/// Whose error shape the caller understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    OpenAi,
    Anthropic,
}

/// What the router does with a request, by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Embeddings,
    Messages,
    CountTokens,
    Rerank,
    /// SGLang's own `/generate`.
    Generate,
    /// Answered by the router.
    Models,
    Health,
    Liveness,
    Readiness,
    /// Anything else: forwarded with the same accounting.
    Other,
}

impl Endpoint {
    /// The endpoint of a request. `path` comes without its query. What engines generate is asked for with a body, so that
    /// `GET` and `HEAD` reach only the router's own endpoints; those are reached by nothing else.
    pub fn of(method_is_get_or_head: bool, path: &[u8]) -> Endpoint {
        if method_is_get_or_head {
            return match path {
                b"/v1/models" | b"/models" => Endpoint::Models,
                b"/health" => Endpoint::Health,
                b"/liveness" => Endpoint::Liveness,
                b"/readiness" => Endpoint::Readiness,
                _ => Endpoint::Other,
            };
        }
        match path.strip_prefix(b"/v1").unwrap_or(path) {
            b"/chat/completions" => Endpoint::Chat,
            b"/completions" => Endpoint::Completions,
            b"/responses" => Endpoint::Responses,
            b"/embeddings" => Endpoint::Embeddings,
            b"/messages" => Endpoint::Messages,
            b"/messages/count_tokens" => Endpoint::CountTokens,
            b"/rerank" => Endpoint::Rerank,
            // SGLang serves it at the root alone.
            _ if path == b"/generate" => Endpoint::Generate,
            _ if path == b"/v2/rerank" => Endpoint::Rerank,
            _ => Endpoint::Other,
        }
    }

    /// Whose error shape a caller of this endpoint understands: Anthropic's for `/v1/messages` and what lies under it.
    pub fn api(self, path: &[u8]) -> Api {
        match self {
            Endpoint::Messages | Endpoint::CountTokens => Api::Anthropic,
            Endpoint::Other => {
                let path = path.strip_prefix(b"/v1").unwrap_or(path);
                match path.strip_prefix(b"/messages") {
                    Some([] | [b'/', ..]) => Api::Anthropic,
                    _ => Api::OpenAi,
                }
            }
            _ => Api::OpenAi,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_their_endpoint_with_and_without_the_version() {
        let posts: [(&[u8], Endpoint); 7] = [
            (b"/chat/completions", Endpoint::Chat),
            (b"/completions", Endpoint::Completions),
            (b"/responses", Endpoint::Responses),
            (b"/embeddings", Endpoint::Embeddings),
            (b"/messages", Endpoint::Messages),
            (b"/messages/count_tokens", Endpoint::CountTokens),
            (b"/rerank", Endpoint::Rerank),
        ];
        for (path, endpoint) in posts {
            assert_eq!(Endpoint::of(false, path), endpoint);
            assert_eq!(Endpoint::of(false, &[b"/v1", path].concat()), endpoint);
            assert_eq!(Endpoint::of(true, path), Endpoint::Other, "a GET generates nothing");
            assert_eq!(Endpoint::of(false, &[path, b"/"].concat()), Endpoint::Other);
            assert_eq!(Endpoint::of(false, &[b"/v3", path].concat()), Endpoint::Other);
        }
        assert_eq!(Endpoint::of(false, b"/v2/rerank"), Endpoint::Rerank);
        assert_eq!(Endpoint::of(false, b"/generate"), Endpoint::Generate);
        assert_eq!(Endpoint::of(false, b"/v1/generate"), Endpoint::Other);
        assert_eq!(Endpoint::of(true, b"/generate"), Endpoint::Other);
    }

    #[test]
    fn the_routers_own_endpoints_are_only_read() {
        let own: [(&[u8], Endpoint); 5] = [
            (b"/v1/models", Endpoint::Models),
            (b"/models", Endpoint::Models),
            (b"/health", Endpoint::Health),
            (b"/liveness", Endpoint::Liveness),
            (b"/readiness", Endpoint::Readiness),
        ];
        for (path, endpoint) in own {
            assert_eq!(Endpoint::of(true, path), endpoint);
            assert_eq!(Endpoint::of(false, path), Endpoint::Other);
        }
        for path in [&b""[..], b"/", b"*", b"/v1", b"/v1/", b"/v1/models/a", b"/v1/health", b"/HEALTH"] {
            assert_eq!(Endpoint::of(true, path), Endpoint::Other);
            assert_eq!(Endpoint::of(false, path), Endpoint::Other);
        }
    }

    #[test]
    fn messages_and_what_lies_under_it_speak_anthropic() {
        let api = |get, path: &[u8]| Endpoint::of(get, path).api(path);
        for path in
            [&b"/v1/messages"[..], b"/messages", b"/v1/messages/count_tokens", b"/v1/messages/batches"]
        {
            assert_eq!(api(false, path), Api::Anthropic);
            assert_eq!(api(true, path), Api::Anthropic);
        }
        for path in
            [&b"/v1/chat/completions"[..], b"/v1/messagesx", b"/v1/models", b"/", b"/v1/threads/messages"]
        {
            assert_eq!(api(false, path), Api::OpenAi);
            assert_eq!(api(true, path), Api::OpenAi);
        }
    }
}
