//! Who asks: the session, the API key, the tier that a request's head names; only digests of the first two go any further.
//!
//! A *session* is the session id field if sent and not blank, else the API key (`Authorization: Bearer …`, or `x-api-key`), else
//! `x-multi-turn-session-id`, else what the body names. A *client*, whose share of the servers' caches is guarded, is the session id
//! field, else the API key, else the peer's address.
//!
//! *Invariant*: no key, id or address is kept: what is made of them cannot be turned back. Different kinds never meet: an API key
//! that equals somebody's session id is another session.
//! *Bound and cost*: one SHA-256 of the key, two where a digest secret is configured; no allocation.
//! *Errors*: none; what is not there or not text counts as not sent.
//! *Source*: the Lifeboat rules, sections 2, 4, 5.6 and 8; RFC 6750 section 2.1 (Bearer); RFC 2104 (HMAC).

use std::net::IpAddr;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256};

use super::affinity::{self, AffinityId};
use crate::proto::http1::{FieldKind, RequestHead};
use crate::proto::ids::ClientId;

/// Names of the router's own request fields, and the secret of its digests.
#[derive(Clone)]
pub struct CallerRules {
    /// Such as `X-Lifeboat-Session-Id`.
    session_field: Box<[u8]>,
    /// Such as `X-Lifeboat-Tier`.
    tier_field: Box<[u8]>,
    /// Keyed with the configured secret.
    secret: Option<Hmac<Sha256>>,
}

impl std::fmt::Debug for CallerRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallerRules").field("secret", &self.secret.is_some()).finish_non_exhaustive()
    }
}

/// What something secret or personal is known by: the first eight bytes of two digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Of SHA-256: alike on every router. Never shown where a secret is configured.
    pub stable: u64,
    /// Of HMAC-SHA-256 with the configured secret; without one, as `stable`. In hex this is what people see.
    pub shown: u64,
}

/// A request's session, as far as its head names one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Session<'a> {
    /// The session id field.
    Named(&'a [u8]),
    /// The API key.
    Key(&'a [u8]),
    /// `x-multi-turn-session-id`.
    MultiTurn(&'a [u8]),
}

/// Kinds of things that are digested; the kinds beside the seed's two are set apart by a word in front.
enum Kind {
    Plain,
    MultiTurn,
    Body,
    Peer,
}

impl Kind {
    const fn word(&self) -> &'static [u8] {
        match self {
            Kind::Plain => b"",
            Kind::MultiTurn => b"multi-turn\0",
            Kind::Body => b"body\0",
            Kind::Peer => b"peer\0",
        }
    }
}

impl CallerRules {
    /// `prefix` is the router's header prefix; an empty `secret` is none.
    pub fn new(prefix: &str, secret: Option<&[u8]>) -> Self {
        let field = |name: &str| format!("{prefix}{name}").into_bytes().into_boxed_slice();
        let secret = secret.filter(|secret| !secret.is_empty());
        CallerRules {
            session_field: field("Session-Id"),
            tier_field: field("Tier"),
            secret: secret.map(|key| Hmac::new_from_slice(key).expect("HMAC takes keys of any length")),
        }
    }

    /// The tier that the request names; empty when it names none. Two different ones are an error: the tier isolates.
    pub fn tier<'a>(&self, head: &RequestHead, buf: &'a [u8]) -> Result<&'a [u8], &'static str> {
        let Some(tier) = self.own(head, buf, &self.tier_field) else { return Ok(b"") };
        let fields = head.fields().iter().filter(|field| field.kind == FieldKind::RouterOwn);
        let mut others = fields.filter(|field| field.name.of(buf).eq_ignore_ascii_case(&self.tier_field));
        match others.all(|field| field.value.is_empty() || field.value.of(buf) == tier) {
            true => Ok(tier),
            false => Err("two fields name different routing tiers; expected one"),
        }
    }

    /// The session that the request's head names.
    pub fn session<'a>(&self, head: &RequestHead, buf: &'a [u8]) -> Option<Session<'a>> {
        let named = self.own(head, buf, &self.session_field).map(Session::Named);
        named
            .or_else(|| api_key(head, buf).map(Session::Key))
            .or_else(|| multi_turn(head, buf).map(Session::MultiTurn))
    }

    /// The conversation that the request's head names, whoever asks.
    pub fn affinity(&self, head: &RequestHead, buf: &[u8]) -> Option<AffinityId> {
        let value = multi_turn(head, buf)?;
        Some(AffinityId::of_value(value).unwrap_or_else(|| self.affinity_of(&Kind::MultiTurn, value)))
    }

    /// The conversation that the body names.
    pub fn affinity_of_body_id(&self, id: &[u8]) -> AffinityId {
        self.affinity_of(&Kind::Body, id)
    }

    /// It is shown to the caller: where there is a secret, nobody else can tell what it was made of.
    fn affinity_of(&self, kind: &Kind, text: &[u8]) -> AffinityId {
        let (word, affinity) = (kind.word(), b"affinity\0");
        let digest = match &self.secret {
            Some(keyed) => keyed
                .clone()
                .chain_update(affinity)
                .chain_update(word)
                .chain_update(text)
                .finalize()
                .into_bytes(),
            None => Sha256::new().chain_update(affinity).chain_update(word).chain_update(text).finalize(),
        };
        AffinityId::new(digest[..16].try_into().expect("digests have 32 bytes"))
    }

    /// Value of one of the router's own fields, if sent and not blank.
    fn own<'a>(&self, head: &RequestHead, buf: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
        // Most requests have none.
        head.first(FieldKind::RouterOwn)?;
        let fields = head.fields().iter().filter(|field| field.kind == FieldKind::RouterOwn);
        let mut named = fields.filter(|field| field.name.of(buf).eq_ignore_ascii_case(name));
        // A blank one counts as not sent.
        named.find(|field| !field.value.is_empty()).map(|field| field.value.of(buf))
    }

    /// The digest of a session.
    pub fn digest(&self, session: Session<'_>) -> Digest {
        match session {
            Session::Named(text) | Session::Key(text) => self.digest_of(Kind::Plain, text),
            Session::MultiTurn(text) => self.digest_of(Kind::MultiTurn, text),
        }
    }

    /// The digest of what the body names as its session or conversation.
    pub fn digest_of_body_id(&self, id: &[u8]) -> Digest {
        self.digest_of(Kind::Body, id)
    }

    /// Who a request counts as that names neither session nor key.
    pub fn client_of_peer(&self, peer: IpAddr) -> ClientId {
        let digest = match peer {
            IpAddr::V4(ip) => self.digest_of(Kind::Peer, &ip.octets()),
            IpAddr::V6(ip) => self.digest_of(Kind::Peer, &ip.octets()),
        };
        ClientId(digest.shown)
    }

    fn digest_of(&self, kind: Kind, text: &[u8]) -> Digest {
        let word = kind.word();
        let stable = first_word(&Sha256::new().chain_update(word).chain_update(text).finalize());
        let shown = self.secret.as_ref().map_or(stable, |keyed| {
            first_word(&keyed.clone().chain_update(word).chain_update(text).finalize().into_bytes())
        });
        Digest { stable, shown }
    }
}

fn first_word(digest: &[u8]) -> u64 {
    u64::from_be_bytes(digest[..8].try_into().expect("digests have 32 bytes"))
}

/// The conversation's id as the head has it; a blank one counts as not sent.
fn multi_turn<'a>(head: &RequestHead, buf: &'a [u8]) -> Option<&'a [u8]> {
    head.named(buf, affinity::FIELD).map(|field| field.of(buf)).filter(|id| !id.is_empty())
}

/// The caller's API key.
fn api_key<'a>(head: &RequestHead, buf: &'a [u8]) -> Option<&'a [u8]> {
    let fields = |kind| head.fields().iter().filter(move |field| field.kind == kind).map(|f| f.value.of(buf));
    let bearer = |value: &'a [u8]| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii()).filter(|key| !key.is_empty())
    };
    let own = || fields(FieldKind::XApiKey).find(|key| !key.is_empty());
    fields(FieldKind::Authorization).find_map(bearer).or_else(own)
}

/// Appends the sixteen lower-case hex digits of a shown digest.
pub fn push_hex(out: &mut Vec<u8>, digest: u64) {
    let digits = b"0123456789abcdef";
    out.extend((0..16).rev().map(|nibble| digits[(digest >> (4 * nibble)) as usize & 15]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::http1::{HeadLimits, HeadScan, parse_request};

    fn session(fields: &str) -> Option<(String, String)> {
        let rules = CallerRules::new("X-Lifeboat-", None);
        let text = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        let mut head = RequestHead::default();
        let limits = HeadLimits::new(65_536, b"X-Lifeboat-");
        parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head).unwrap();
        let text = text.as_bytes();
        let session = rules.session(&head, text)?;
        let (kind, value) = match session {
            Session::Named(value) => ("named", value),
            Session::Key(value) => ("key", value),
            Session::MultiTurn(value) => ("multi-turn", value),
        };
        match fields.matches("Tier").count() {
            0 => assert_eq!(rules.tier(&head, text), Ok(&b""[..])),
            1 => assert_eq!(rules.tier(&head, text), Ok(&b"gold"[..])),
            _ => assert_eq!(rules.tier(&head, text).is_ok(), !fields.contains("silver")),
        }
        Some((kind.to_owned(), String::from_utf8_lossy(value).into_owned()))
    }

    #[test]
    fn the_first_of_field_key_and_multi_turn_id_names_the_session() {
        let own = "x-lifeboat-session-id: s1\r\n";
        let (bearer, key) = ("Authorization: bearer  k1\r\n", "x-api-key: k2\r\n");
        let turn = "X-Multi-Turn-Session-Id: t1\r\n";
        let found = |fields: &[&str]| session(&fields.concat());
        let some = |kind: &str, value: &str| Some((kind.to_owned(), value.to_owned()));
        assert_eq!(found(&[turn, key, bearer, own]), some("named", "s1"));
        assert_eq!(found(&[turn, key, bearer]), some("key", "k1"));
        assert_eq!(found(&[turn, key, "Authorization: Basic Zm9v\r\n"]), some("key", "k2"));
        assert_eq!(found(&[turn, key, "Authorization: Bearer \r\n"]), some("key", "k2"));
        assert_eq!(found(&[turn]), some("multi-turn", "t1"));
        assert_eq!(
            found(&["X-Lifeboat-Session-Id:   \r\n", "X-Lifeboat-Tier: gold\r\n", key]),
            some("key", "k2")
        );
        found(&["X-Lifeboat-Tier: gold\r\n", "x-lifeboat-tier: silver\r\n", "X-Api-Key: Tier\r\n"]);
        found(&["X-Lifeboat-Tier: gold\r\n", "X-Lifeboat-Tier: gold\r\n"]);
        // Blank ones, and credentials of other kinds, hide nothing.
        assert_eq!(found(&["X-Lifeboat-Session-Id:\r\n", own]), some("named", "s1"));
        assert_eq!(found(&["Authorization: Basic x\r\n", "Authorization:\r\n", bearer]), some("key", "k1"));
        assert_eq!(found(&["X-Lifeboat-Tier:\r\n", "X-Lifeboat-Tier: gold\r\n", key]), some("key", "k2"));
        assert_eq!(found(&["Authorization: short\r\n", "X-Api-Key:\r\n"]), None);
    }

    #[test]
    fn digests_are_those_that_anybody_can_compute() {
        // SHA-256 of "abc", FIPS 180-4; HMAC-SHA-256 of "what do ya want for nothing?" with "Jefe", RFC 4231 case 2.
        let plain = CallerRules::new("X-", None).digest(Session::Named(b"abc"));
        assert_eq!((plain.stable, plain.shown), (0xba78_16bf_8f01_cfea, 0xba78_16bf_8f01_cfea));
        let keyed = CallerRules::new("X-", Some(b"Jefe"));
        let digest = keyed.digest(Session::Key(b"what do ya want for nothing?"));
        assert_eq!(digest.shown, 0x5bdc_c146_bf60_754e);
        assert_ne!(digest.stable, digest.shown);
        let mut hex = Vec::new();
        push_hex(&mut hex, 0x0123_4567_89ab_cdef);
        assert_eq!(hex, b"0123456789abcdef");
    }

    #[test]
    fn a_conversation_is_the_same_by_its_own_value_and_by_what_it_was_made_of() {
        let conversation = |rules: &CallerRules, value: &str| {
            let text = format!("POST / HTTP/1.1\r\nHost: a\r\nX-Multi-Turn-Session-Id: {value}\r\n\r\n");
            let mut head = RequestHead::default();
            let limits = HeadLimits::new(65_536, b"X-Lifeboat-");
            parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head).unwrap();
            rules.affinity(&head, text.as_bytes())
        };
        let (plain, keyed) = (CallerRules::new("X-", None), CallerRules::new("X-", Some(b"secret")));
        for rules in [&plain, &keyed] {
            let named = conversation(rules, "turn-1").unwrap();
            let body = rules.affinity_of_body_id(b"turn-1");
            assert_ne!(named, body);
            for id in [named, body] {
                let mut value = Vec::new();
                id.push_value(&mut value);
                assert_eq!(conversation(rules, std::str::from_utf8(&value).unwrap()), Some(id));
            }
            assert_eq!(conversation(rules, " "), None);
        }
        assert_ne!(conversation(&plain, "turn-1"), conversation(&keyed, "turn-1"));
    }

    #[test]
    fn kinds_do_not_meet_and_the_secret_does_not_show() {
        let rules = CallerRules::new("X-", Some(b"secret word"));
        let named = rules.digest(Session::Named(b"1")).shown;
        let others = [rules.digest(Session::MultiTurn(b"1")).shown, rules.digest_of_body_id(b"1").shown];
        assert!(!others.contains(&named) && others[0] != others[1]);
        assert_ne!(rules.client_of_peer([1, 2, 3, 4].into()), rules.client_of_peer([1, 2, 3, 5].into()));
        assert!(!format!("{rules:?}").contains("secret word"));
    }
}
