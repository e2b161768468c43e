//! Header fields: where they are, and which of them mean something to a router.
//!
//! *Invariant*: a field nominated by `Connection` counts as absent everywhere (RFC 9110 section 7.6.1), except those that
//! say where a message goes, where it ends or what its content is: such a nomination is void, so that no client
//! can make the router and an engine read two different messages.
//! *Bound and cost*: [`classify`] is a switch on length and first byte and at most one comparison. `Connection` may list
//! [`CONNECTION_OPTIONS_MAX`] names besides its own words, so that names times fields stays small.
//! *Source*: RFC 9110 sections 5, 7.6.1, 10.1.

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
    /// Where `part`, a slice of `buf`, lies in it. Heads are far below 4 GiB ([`super::HeadLimits`]).
    #[inline]
    pub(super) fn within(buf: &[u8], part: &[u8]) -> Span {
        let start = part.as_ptr().addr() - buf.as_ptr().addr();
        debug_assert!(start + part.len() <= buf.len());
        Span { start: start as u32, end: (start + part.len()) as u32 }
    }
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
    /// Any `Proxy-…` name but `Proxy-Status`, which is for the whole way (RFC 9209).
    ProxyAny,
    Te,
    Trailer,
    Upgrade,
    ContentType,
    ContentEncoding,
    Authorization,
    XApiKey,
    /// Begins with the router's own header prefix.
    RouterOwn,
    /// Named by `Connection`: for this hop only.
    Nominated,
}

impl FieldKind {
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

/// The kind of a field called `name` (not empty). `router_prefix` may be empty: then nothing is [`FieldKind::RouterOwn`].
#[inline]
pub fn classify(name: &[u8], router_prefix: &[u8]) -> FieldKind {
    let first = name[0] | 0x20;
    let (known, kind): (&[u8], FieldKind) = match (name.len(), first) {
        (2, b't') => (b"te", FieldKind::Te),
        (4, b'h') => (b"host", FieldKind::Host),
        (6, b'e') => (b"expect", FieldKind::Expect),
        (7, b't') => (b"trailer", FieldKind::Trailer),
        (7, b'u') => (b"upgrade", FieldKind::Upgrade),
        (9, b'x') => (b"x-api-key", FieldKind::XApiKey),
        (10, b'c') => (b"connection", FieldKind::Connection),
        (10, b'k') => (b"keep-alive", FieldKind::KeepAlive),
        (12, b'c') => (b"content-type", FieldKind::ContentType),
        (13, b'a') => (b"authorization", FieldKind::Authorization),
        (14, b'c') => (b"content-length", FieldKind::ContentLength),
        (16, b'c') => (b"content-encoding", FieldKind::ContentEncoding),
        (17, b't') => (b"transfer-encoding", FieldKind::TransferEncoding),
        (7.., b'p') if name[..6].eq_ignore_ascii_case(b"proxy-") => {
            let to_the_end = name.eq_ignore_ascii_case(b"proxy-status");
            return if to_the_end { FieldKind::Other } else { FieldKind::ProxyAny };
        }
        _ => (b"", FieldKind::Other),
    };
    if kind != FieldKind::Other && name.eq_ignore_ascii_case(known) {
        return kind;
    }
    if has_prefix(name, router_prefix) { FieldKind::RouterOwn } else { FieldKind::Other }
}

/// Whether `name` begins with the router's prefix, in any case, and goes on after it.
#[inline]
pub(super) fn has_prefix(name: &[u8], router_prefix: &[u8]) -> bool {
    let n = router_prefix.len();
    n > 0 && name.len() > n && name[0] | 0x20 == router_prefix[0] | 0x20 && {
        name[..n].eq_ignore_ascii_case(router_prefix)
    }
}

/// The `Connection` words that a router acts on itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionWords {
    pub close: bool,
    pub keep_alive: bool,
}

/// Reads every `Connection` field and marks what they nominate.
pub(super) fn apply_connection(buf: &[u8], fields: &mut [Field]) -> Result<ConnectionWords, &'static str> {
    let mut words = ConnectionWords::default();
    let mut names = 0;
    for i in 0..fields.len() {
        if fields[i].kind != FieldKind::Connection {
            continue;
        }
        for word in fields[i].value.of(buf).split(|&b| b == b',') {
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
                nominate(buf, fields, word);
            }
        }
    }
    Ok(words)
}

fn nominate(buf: &[u8], fields: &mut [Field], name: &[u8]) {
    for field in fields {
        // Framing, routing and content fields stay what they are, and so do the router's own: a gateway in front that
        // passes a client's nominations on must not lose the tier it has set. All hop-by-hop kinds are removed anyway.
        let open = matches!(field.kind, FieldKind::Other | FieldKind::Authorization | FieldKind::XApiKey);
        if open && field.name.of(buf).eq_ignore_ascii_case(name) {
            field.kind = FieldKind::Nominated;
        }
    }
}

/// `tchar` of RFC 9110 section 5.6.2.
#[inline]
pub(super) const fn is_token_byte(b: u8) -> bool {
    TOKEN[b as usize]
}

const TOKEN: [bool; 256] = {
    let mut table = [false; 256];
    let mut b = 0;
    while b < 256 {
        table[b] = (b as u8).is_ascii_alphanumeric();
        b += 1;
    }
    let marks = b"!#$%&'*+-.^_`|~";
    let mut i = 0;
    while i < marks.len() {
        table[marks[i] as usize] = true;
        i += 1;
    }
    table
};

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
            ("proxy-connection", FieldKind::ProxyAny),
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

    #[test]
    fn token_bytes_are_those_of_the_rfc() {
        let marks = "!#$%&'*+-.^_`|~";
        for b in 0..=255u8 {
            let expected = b.is_ascii_alphanumeric() || marks.as_bytes().contains(&b);
            assert_eq!(is_token_byte(b), expected, "{b:#x}");
        }
    }
}
