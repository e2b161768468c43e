//! Header fields: where they are, and which of them mean something to a router.
//!
//! *Invariant*: a field nominated by `Connection` counts as absent everywhere (RFC 9110 section 7.6.1), except those that
//! say where a message goes, where it ends or what its content is: such a nomination is void, so that no client
//! can make the router and an engine read two different messages.
//! *Bound and cost*: [`classify`] is a switch on length and at most two comparisons, eight bytes at a time. `Connection` may list
//! [`CONNECTION_OPTIONS_MAX`] names besides its own words, so that names times fields stays small.
//! *Source*: RFC 9110 sections 5, 7.6.1, 10.1.

use std::ops::Range;

/// Names that the `Connection` fields of one head may nominate; more is refused.
pub const CONNECTION_OPTIONS_MAX: usize = 32;

/// A range of bytes in the buffer the head was parsed from: `start..end`, counted from the buffer's first byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    pub start: u32,
    pub end: u32,
}

impl Span {
    /// The bytes of this span. `buf` is the buffer that was parsed; panics if it is shorter.
    #[inline]
    pub fn of(self, buf: &[u8]) -> &[u8] {
        &buf[self.start as usize..self.end as usize]
    }
    #[inline]
    pub const fn len(self) -> usize {
        (self.end - self.start) as usize
    }
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }
    /// Heads are far below 4 GiB ([`super::HeadLimits`]).
    #[inline]
    pub(super) const fn new(start: usize, end: usize) -> Span {
        Span { start: start as u32, end: end as u32 }
    }
}

/// What a field name means to the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FieldKind {
    /// Nothing: forwarded as it is.
    Other,
    Connection,
    ContentLength,
    TransferEncoding,
    Host,
    Expect,
    KeepAlive,
    ProxyConnection,
    /// Any other `Proxy-…` name but `Proxy-Status`, which is for the whole way (RFC 9209).
    ProxyAny,
    Te,
    Trailer,
    Upgrade,
    ContentType,
    ContentEncoding,
    Authorization,
    XApiKey,
    TraceParent,
    TraceState,
    /// Tells a router of the Stargate contract where a request may go and how long it may wait: `x-model`, `x-priority` and their like,
    /// and every `x-stargate-…` that is none of the kinds below.
    Steering,
    /// Said between such a router and its neighbours, for no one else: `x-routing-method`, `x-stargate-retryable` and their like.
    Neighbourly,
    /// `x-inference-server-id`, `x-inference-server-url`.
    ServerIdentity,
    /// `x-stargate-cluster-id`.
    ClusterIdentity,
    /// Begins with the router's own header prefix.
    RouterOwn,
    /// Named by `Connection`: for this hop only.
    Nominated,
}

impl FieldKind {
    /// How many kinds there are.
    pub(super) const COUNT: usize = FieldKind::Nominated as usize + 1;

    #[inline]
    pub(super) const fn bit(self) -> u32 {
        1 << self as u8
    }
}

/// One field line. The line's bytes run from `name.start` to the next field's `name.start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: Span,
    /// Without the white space around it. May hold any byte but controls (HTAB is allowed).
    pub value: Span,
    pub kind: FieldKind,
}

/// The kind of a field called `name` (not empty; token bytes only). `router_prefix` may be empty: then nothing is
/// [`FieldKind::RouterOwn`].
#[inline(always)]
pub fn classify(name: &[u8], router_prefix: &[u8]) -> FieldKind {
    if name[0] | 0x20 == b'x' {
        // A family of its own: most of what begins so is known here, or is nobody's.
        return match of_x(name) {
            FieldKind::Other if has_prefix(name, router_prefix) => FieldKind::RouterOwn,
            kind => kind,
        };
    }
    match name.len() {
        2 if is(name, b"te") => return FieldKind::Te,
        4 if is(name, b"host") => return FieldKind::Host,
        6 if is(name, b"expect") => return FieldKind::Expect,
        7 if is(name, b"trailer") => return FieldKind::Trailer,
        7 if is(name, b"upgrade") => return FieldKind::Upgrade,
        10 if is(name, b"connection") => return FieldKind::Connection,
        10 if is(name, b"keep-alive") => return FieldKind::KeepAlive,
        10 if is(name, b"tracestate") => return FieldKind::TraceState,
        11 if is(name, b"traceparent") => return FieldKind::TraceParent,
        12 if is(name, b"content-type") => return FieldKind::ContentType,
        12 if is(name, b"proxy-status") => return FieldKind::Other,
        13 if is(name, b"authorization") => return FieldKind::Authorization,
        14 if is(name, b"content-length") => return FieldKind::ContentLength,
        16 if is(name, b"content-encoding") => return FieldKind::ContentEncoding,
        17 if is(name, b"transfer-encoding") => return FieldKind::TransferEncoding,
        _ => {}
    }
    if name[0] | 0x20 == b'p' && name.len() > 6 && is(&name[..6], b"proxy-") {
        return if is(name, b"proxy-connection") { FieldKind::ProxyConnection } else { FieldKind::ProxyAny };
    }
    if has_prefix(name, router_prefix) { FieldKind::RouterOwn } else { FieldKind::Other }
}

/// The kind of a field whose name begins with `x` or `X`, the router's own aside.
#[inline(always)]
fn of_x(name: &[u8]) -> FieldKind {
    // The letter behind `x-` leaves few.
    match (name.get(2).map_or(0, |b| b | 0x20), name.len()) {
        (b'a', 9) if is(name, b"x-api-key") => FieldKind::XApiKey,
        (b'm', 7) if is(name, b"x-model") => FieldKind::Steering,
        (b'm', 13) if is(name, b"x-max-wait-ms") => FieldKind::Steering,
        (b'p', 10) if is(name, b"x-priority") => FieldKind::Steering,
        (b'r', 13) if is(name, b"x-routing-key") => FieldKind::Steering,
        (b'r', 16) if is(name, b"x-request-slo-ms") => FieldKind::Steering,
        (b'r', 16) if is(name, b"x-routing-method") => FieldKind::Neighbourly,
        (b'i', 14) if is(name, b"x-input-tokens") => FieldKind::Steering,
        (b'i', 21) if is(name, b"x-inference-server-id") => FieldKind::ServerIdentity,
        (b'i', 22) if is(name, b"x-inference-server-url") => FieldKind::ServerIdentity,
        (b'c', 20) if is(name, b"x-cache-affinity-key") => FieldKind::Steering,
        (b's', 12..) if is(&name[..11], b"x-stargate-") => of_stargate(&name[11..]),
        _ => FieldKind::Other,
    }
}

/// The kind of a field called `x-stargate-` and `rest`.
fn of_stargate(rest: &[u8]) -> FieldKind {
    match rest.len() {
        9 if is(rest, b"retryable") => FieldKind::Neighbourly,
        12 if is(rest, b"retry-reason") => FieldKind::Neighbourly,
        14 if is(rest, b"retry-after-ms") => FieldKind::Neighbourly,
        17 if is(rest, b"expected-queue-ms") => FieldKind::Neighbourly,
        10 if is(rest, b"error-code") => FieldKind::Neighbourly,
        10 if is(rest, b"cluster-id") => FieldKind::ClusterIdentity,
        _ => FieldKind::Steering,
    }
}

/// Bit 5 of each byte, which makes a capital a small letter.
const FOLD: u64 = u64::from_ne_bytes([0x20; 8]);

/// Whether `text` is `known` in any case. `known` holds lower-case letters, digits, `-` and `/`; `text` no control but
/// HTAB: then setting bit 5 turns exactly its capitals into the letters of `known`, and nothing else into any of it.
#[inline(always)]
pub(super) fn is<const N: usize>(text: &[u8], known: &[u8; N]) -> bool {
    let Ok(text) = <&[u8; N]>::try_from(text) else { return false };
    let mut different = 0;
    // Whole words; the last one overlaps the one before. `N` is known, so that this is one comparison for each.
    if N >= 8 {
        let mut at = 0;
        while at < N {
            let from = if at + 8 <= N { at } else { N - 8 };
            different |= (word::<8>(text, from) | FOLD) ^ word::<8>(known, from);
            at += 8;
        }
    } else if N >= 4 {
        different |= (word::<4>(text, 0) | FOLD as u32 as u64) ^ word::<4>(known, 0);
        different |= (word::<4>(text, N - 4) | FOLD as u32 as u64) ^ word::<4>(known, N - 4);
    } else {
        for (a, b) in text.iter().zip(known) {
            different |= ((a | 0x20) ^ b) as u64;
        }
    }
    different == 0
}

/// `N` bytes of `bytes` from `at` on, little end first.
#[inline(always)]
fn word<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(word)
}

/// Whether `name` begins with the router's prefix, in any case, and goes on after it.
#[inline]
pub(super) fn has_prefix(name: &[u8], router_prefix: &[u8]) -> bool {
    let n = router_prefix.len();
    if n == 0 || name.len() <= n {
        return false;
    }
    // Many names begin with `x-` as the prefix does: a whole word tells them apart at once.
    if n >= 8 && (word::<8>(name, 0) ^ word::<8>(router_prefix, 0)) & !FOLD != 0 {
        return false;
    }
    name[..n].eq_ignore_ascii_case(router_prefix)
}

/// The `Connection` words that a router acts on itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionWords {
    pub close: bool,
    pub keep_alive: bool,
}

/// Reads every `Connection` field, all of which are in `places`, and marks what they nominate, unless nominations are `void`.
pub(super) fn apply_connection(
    buf: &[u8],
    places: Range<usize>,
    fields: &mut [Field],
    void: bool,
) -> Result<ConnectionWords, &'static str> {
    let mut words = ConnectionWords::default();
    let mut names = 0;
    for i in places {
        if fields[i].kind != FieldKind::Connection {
            continue;
        }
        let value = fields[i].value.of(buf);
        if is(value, b"keep-alive") {
            words.keep_alive = true;
            continue;
        }
        for word in value.split(|&b| b == b',') {
            let word = word.trim_ascii();
            if word.eq_ignore_ascii_case(b"close") {
                words.close = true;
            } else if word.eq_ignore_ascii_case(b"keep-alive") {
                words.keep_alive = true;
            } else if !word.is_empty() {
                names += 1;
                if names > CONNECTION_OPTIONS_MAX {
                    return Err("Connection names more than 32 fields");
                }
                if !word.iter().all(|&b| is_token_byte(b)) {
                    return Err("Connection: expected a comma-separated list of field names");
                }
                if !void {
                    nominate(buf, fields, word);
                }
            }
        }
    }
    Ok(words)
}

/// The kinds that can be nominated.
const OPEN: u32 = FieldKind::Other.bit()
    | FieldKind::Authorization.bit()
    | FieldKind::XApiKey.bit()
    | FieldKind::TraceParent.bit()
    | FieldKind::TraceState.bit()
    | FieldKind::Steering.bit()
    | FieldKind::Neighbourly.bit()
    | FieldKind::ServerIdentity.bit()
    | FieldKind::ClusterIdentity.bit();

fn nominate(buf: &[u8], fields: &mut [Field], name: &[u8]) {
    for field in fields {
        // Framing, routing and content fields stay what they are, and so do the router's own: a gateway in front that
        // passes a client's nominations on must not lose the tier it has set. All hop-by-hop kinds are removed anyway.
        let open = OPEN & field.kind.bit() != 0;
        if open && field.name.of(buf).eq_ignore_ascii_case(name) {
            field.kind = FieldKind::Nominated;
        }
    }
}

/// `tchar` of RFC 9110 section 5.6.2.
#[inline]
pub(super) const fn is_token_byte(b: u8) -> bool {
    CLASS[b as usize] & IN_TOKEN != 0
}

/// Visible ASCII but `#`: what a request target may hold.
#[inline]
pub(super) const fn is_target_byte(b: u8) -> bool {
    CLASS[b as usize] & IN_TARGET != 0
}

/// What a host with port may hold, without user information.
#[inline]
pub(super) const fn is_authority_byte(b: u8) -> bool {
    CLASS[b as usize] & IN_AUTHORITY != 0
}

const IN_TOKEN: u8 = 1;
const IN_TARGET: u8 = 2;
const IN_AUTHORITY: u8 = 4;

static CLASS: [u8; 256] = {
    let mut table = [0; 256];
    mark(&mut table, b"!#$%&'*+-.^_`|~", IN_TOKEN);
    mark(&mut table, b"-._~%!$&'()*+;=:[]", IN_AUTHORITY);
    let mut b = 0;
    while b < 128 {
        if (b as u8).is_ascii_alphanumeric() {
            table[b] |= IN_TOKEN | IN_AUTHORITY;
        }
        if (b as u8).is_ascii_graphic() && b as u8 != b'#' {
            table[b] |= IN_TARGET;
        }
        b += 1;
    }
    table
};

const fn mark(table: &mut [u8; 256], bytes: &[u8], class: u8) {
    let mut i = 0;
    while i < bytes.len() {
        table[bytes[i] as usize] |= class;
        i += 1;
    }
}

/// A byte that a field value may hold: HTAB, SP, visible ASCII and obs-text.
#[inline]
pub(super) const fn is_value_byte(b: u8) -> bool {
    b == b'\t' || (b >= b' ' && b != 0x7f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_has_its_kind_in_any_case() {
        let table: &[(&str, FieldKind)] = &[
            ("te", FieldKind::Te),
            ("host", FieldKind::Host),
            ("expect", FieldKind::Expect),
            ("trailer", FieldKind::Trailer),
            ("upgrade", FieldKind::Upgrade),
            ("x-api-key", FieldKind::XApiKey),
            ("connection", FieldKind::Connection),
            ("keep-alive", FieldKind::KeepAlive),
            ("content-type", FieldKind::ContentType),
            ("authorization", FieldKind::Authorization),
            ("content-length", FieldKind::ContentLength),
            ("content-encoding", FieldKind::ContentEncoding),
            ("transfer-encoding", FieldKind::TransferEncoding),
            ("proxy-connection", FieldKind::ProxyConnection),
            ("traceparent", FieldKind::TraceParent),
            ("tracestate", FieldKind::TraceState),
            ("x-model", FieldKind::Steering),
            ("x-priority", FieldKind::Steering),
            ("x-routing-key", FieldKind::Steering),
            ("x-max-wait-ms", FieldKind::Steering),
            ("x-input-tokens", FieldKind::Steering),
            ("x-request-slo-ms", FieldKind::Steering),
            ("x-cache-affinity-key", FieldKind::Steering),
            ("x-stargate-max-wait-ms", FieldKind::Steering),
            ("x-stargate-last-cluster-id", FieldKind::Steering),
            ("x-stargate-cluster-ix", FieldKind::Steering),
            ("x-stargate-x", FieldKind::Steering),
            ("x-routing-method", FieldKind::Neighbourly),
            ("x-stargate-retryable", FieldKind::Neighbourly),
            ("x-stargate-retry-reason", FieldKind::Neighbourly),
            ("x-stargate-retry-after-ms", FieldKind::Neighbourly),
            ("x-stargate-expected-queue-ms", FieldKind::Neighbourly),
            ("x-stargate-error-code", FieldKind::Neighbourly),
            ("x-stargate-cluster-id", FieldKind::ClusterIdentity),
            ("x-inference-server-id", FieldKind::ServerIdentity),
            ("x-inference-server-url", FieldKind::ServerIdentity),
            ("x-stargate-", FieldKind::Other),
            ("x-stargates-x", FieldKind::Other),
            ("x-request-id", FieldKind::Other),
            ("x-multi-turn-session-id", FieldKind::Other),
            ("x", FieldKind::Other),
            ("proxy-authenticate", FieldKind::ProxyAny),
            ("proxy-authorization", FieldKind::ProxyAny),
            ("proxy-status", FieldKind::Other),
            ("proxy", FieldKind::Other),
            ("x-lifeboat-server", FieldKind::RouterOwn),
            ("x-lifeboat-", FieldKind::Other),
            ("x-lifeboa", FieldKind::Other),
            ("content_length", FieldKind::Other),
            ("hosts", FieldKind::Other),
            ("hose", FieldKind::Other),
            ("accept", FieldKind::Other),
            ("t", FieldKind::Other),
        ];
        for (name, kind) in table {
            for name in [name.to_string(), name.to_uppercase()] {
                assert_eq!(classify(name.as_bytes(), b"X-Lifeboat-"), *kind, "{name}");
            }
        }
        assert_eq!(classify(b"X-Lifeboat-Server", b""), FieldKind::Other);
    }

    /// Every byte that a value or a name may hold, at every place of every known text.
    #[test]
    fn a_known_text_is_itself_in_any_case_and_nothing_else() {
        fn check<const N: usize>(known: &[u8; N]) {
            for place in 0..N {
                for b in (0..=255).filter(|&b| is_value_byte(b)) {
                    let mut text = *known;
                    text[place] = b;
                    assert_eq!(is(&text, known), text.eq_ignore_ascii_case(known), "{}", text.escape_ascii());
                }
            }
            assert!(!is(&known[1..], known) && !is(&[known, &b"x"[..]].concat(), known));
        }
        check(b"te");
        check(b"host");
        check(b"close");
        check(b"expect");
        check(b"proxy-");
        check(b"trailer");
        check(b"upgrade");
        check(b"chunked");
        check(b"x-api-key");
        check(b"connection");
        check(b"keep-alive");
        check(b"content-type");
        check(b"100-continue");
        check(b"proxy-status");
        check(b"authorization");
        check(b"content-length");
        check(b"content-encoding");
        check(b"transfer-encoding");
        check(b"text/event-stream");
        check(b"proxy-connection");
        check(b"tracestate");
        check(b"traceparent");
        check(b"x-model");
        check(b"x-priority");
        check(b"x-routing-key");
        check(b"x-max-wait-ms");
        check(b"x-input-tokens");
        check(b"x-request-slo-ms");
        check(b"x-routing-method");
        check(b"x-cache-affinity-key");
        check(b"x-inference-server-id");
        check(b"x-inference-server-url");
        check(b"x-stargate-");
        check(b"retryable");
        check(b"retry-reason");
        check(b"retry-after-ms");
        check(b"expected-queue-ms");
        check(b"error-code");
        check(b"cluster-id");
    }

    #[test]
    fn byte_classes_are_those_of_the_rfc() {
        let marks = "!#$%&'*+-.^_`|~";
        for b in 0..=255u8 {
            let expected = b.is_ascii_alphanumeric() || marks.as_bytes().contains(&b);
            assert_eq!(is_token_byte(b), expected, "{b:#x}");
            let in_host = b.is_ascii_alphanumeric() || b"-._~%!$&'()*+;=:[]".contains(&b);
            assert_eq!(is_authority_byte(b), in_host, "{b:#x}");
            assert_eq!(is_target_byte(b), (b'!'..=b'~').contains(&b) && b != b'#', "{b:#x}");
        }
    }
}
