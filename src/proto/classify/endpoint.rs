//! Which API an endpoint belongs to, from method and path alone.

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
    /// Answered by the router.
    Models,
    Health,
    Liveness,
    Readiness,
    /// Anything else: forwarded with the same accounting.
    Other,
}
