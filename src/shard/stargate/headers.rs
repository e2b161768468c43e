//! What the headers of a request on a trusted listener ask for.
//!
//! *Invariant*: of repeated headers the first alone is looked at. A text that is not visible ASCII counts as absent; a number that is
//! there and no number is a fault.
//! *Bound and cost*: one walk over the fields; nothing is copied.
//! *Errors*: [`Invalid`], in the order of the rules.
//! *Source*: the Stargate rules, sections 3.1 and 4.2.

use crate::clock::Nanos;
use crate::proto::config::expression::{self, Refused};
use crate::proto::http1::{FieldKind, RequestHead};
use crate::proto::stargate::request::Wish;

/// Why a request gets no further than its headers: 400.
#[derive(Clone, Debug, PartialEq)]
pub enum Invalid {
    /// Something that is required is missing or blank, or a number is none.
    Header,
    /// `x-routing-method` cannot be read at all.
    Method(Refused),
}

/// The router headers, as they came.
#[derive(Clone, Copy, Debug, Default)]
pub struct Headers<'a> {
    request_id: Option<&'a [u8]>,
    input_tokens: Option<&'a [u8]>,
    model: Option<&'a [u8]>,
    routing_key: Option<&'a [u8]>,
    method: Option<&'a [u8]>,
    priority: Option<&'a [u8]>,
    max_wait: Option<&'a [u8]>,
    slo: Option<&'a [u8]>,
    affinity_key: Option<&'a [u8]>,
    retry_budget: Option<&'a [u8]>,
    pub trace_parent: Option<&'a [u8]>,
}

impl<'a> Headers<'a> {
    /// `buf`: what `head` was parsed from. `retry_budget_name`: of the header with the retry budget, in any case; empty: there is none.
    pub fn read(head: &RequestHead, buf: &'a [u8], retry_budget_name: &[u8]) -> Headers<'a> {
        let mut headers = Headers::default();
        for field in head.fields() {
            let name = field.name.of(buf);
            let value = field.value.of(buf);
            if name.len() == retry_budget_name.len() && name.eq_ignore_ascii_case(retry_budget_name) {
                headers.retry_budget.get_or_insert(value);
            }
            let is = |known: &[u8]| name.eq_ignore_ascii_case(known);
            let place = match (field.kind, name.len()) {
                (FieldKind::Other, 12) if is(b"x-request-id") => &mut headers.request_id,
                (FieldKind::Steering, 7) if is(b"x-model") => &mut headers.model,
                (FieldKind::Steering, 10) if is(b"x-priority") => &mut headers.priority,
                (FieldKind::Steering, 13) if is(b"x-routing-key") => &mut headers.routing_key,
                (FieldKind::Steering, 13) if is(b"x-max-wait-ms") => &mut headers.max_wait,
                (FieldKind::Steering, 14) if is(b"x-input-tokens") => &mut headers.input_tokens,
                (FieldKind::Steering, 16) if is(b"x-request-slo-ms") => &mut headers.slo,
                (FieldKind::Steering, 20) if is(b"x-cache-affinity-key") => &mut headers.affinity_key,
                (FieldKind::Neighbourly, 16) if is(b"x-routing-method") => &mut headers.method,
                (FieldKind::TraceParent, _) => &mut headers.trace_parent,
                _ => continue,
            };
            place.get_or_insert(value);
        }
        headers
    }

    /// Everything but the retry budget, which is looked at later.
    pub fn wish(&self, arrived: Nanos, embeddings: bool) -> Result<Wish<'a>, Invalid> {
        text(self.request_id).ok_or(Invalid::Header)?;
        let input_tokens = number(self.input_tokens)?.ok_or(Invalid::Header)?;
        let model = text(self.model).ok_or(Invalid::Header)?;
        let (priority, max_wait_ms, slo_ms) = self.numbers().map_err(|invalid| {
            // What cannot be read as a method comes first. (What can is read again where it is asked for.)
            match self.method.map(expression::parse) {
                Some(Err(refused)) => Invalid::Method(refused),
                _ => invalid,
            }
        })?;
        Ok(Wish {
            arrived,
            routing_key: self.routing_key(),
            model,
            embeddings,
            method: self.method,
            input_tokens,
            priority,
            max_wait_ms,
            slo_ms,
            affinity_key: text(self.affinity_key).unwrap_or_default(),
            retry_budget_ms: self.retry_budget_ms().unwrap_or_default(),
        })
    }

    fn numbers(&self) -> Result<(u32, Option<u64>, Option<u64>), Invalid> {
        let priority = match number(self.priority)? {
            Some(priority) => u32::try_from(priority).map_err(|_| Invalid::Header)?,
            None => 0,
        };
        Ok((priority, number(self.max_wait)?, number(self.slo)?))
    }

    /// `None`: there is no budget.
    pub fn retry_budget_ms(&self) -> Result<Option<u64>, Invalid> {
        number(self.retry_budget)
    }

    /// Empty: there is none.
    pub fn routing_key(&self) -> &'a [u8] {
        text(self.routing_key).unwrap_or_default()
    }

    /// Empty: there is none.
    pub fn model(&self) -> &'a [u8] {
        text(self.model).unwrap_or_default()
    }

    /// `x-routing-method`, as it came.
    pub fn method(&self) -> Option<&'a [u8]> {
        self.method
    }
}

fn is_visible(b: u8) -> bool {
    b == b'\t' || (b' '..=b'~').contains(&b)
}

/// A text that is there and not blank, without white space around it.
fn text(value: Option<&[u8]>) -> Option<&[u8]> {
    let value = value.filter(|value| value.iter().copied().all(is_visible))?.trim_ascii();
    (!value.is_empty()).then_some(value)
}

/// Decimal digits, with a `+` before them or without.
fn number(value: Option<&[u8]>) -> Result<Option<u64>, Invalid> {
    let Some(value) = value else { return Ok(None) };
    let value = value.trim_ascii();
    let digits = value.strip_prefix(b"+").unwrap_or(value);
    if digits.is_empty() {
        return Err(Invalid::Header);
    }
    let mut number = 0u64;
    for digit in digits {
        let digit = digit.wrapping_sub(b'0');
        let next = number.checked_mul(10).and_then(|tens| tens.checked_add(digit.into()));
        number = next.filter(|_| digit < 10).ok_or(Invalid::Header)?;
    }
    Ok(Some(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::config::expression::Code;
    use crate::proto::http1::{HeadLimits, HeadScan, parse_request};

    const BUDGET: &[u8] = b"X-Stargate-Max-Wait-Ms";

    /// What comes of `lines`, behind the three required headers or in place of them.
    fn with<T>(lines: &str, look: impl FnOnce(&Headers<'_>) -> T) -> T {
        let text = format!("POST /v1/responses HTTP/1.1\r\nHost: a\r\n{lines}\r\n");
        let limits = HeadLimits { nominations_void: true, ..HeadLimits::new(65_536, b"") };
        let mut head = RequestHead::default();
        parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head).expect(lines);
        look(&Headers::read(&head, text.as_bytes(), BUDGET))
    }

    const REQUIRED: &str = "x-request-id: r\r\nx-input-tokens: 1\r\nx-model: m\r\n";

    fn fault(lines: &str) -> Option<Invalid> {
        with(lines, |headers| headers.wish(Nanos(0), false).err())
    }

    fn refused(more: &str) -> Option<Invalid> {
        fault(&format!("{REQUIRED}{more}"))
    }

    #[test]
    fn all_that_is_said_is_read_and_trimmed() {
        let lines = "X-Request-Id: r\r\nx-input-tokens:\t +12 \r\nX-MODEL:  m 1 \r\nx-model: second\r\nx-routing-key: k\r\n\
            x-routing-method: pulsar;seed=a\r\nx-priority: 4294967295\r\nx-max-wait-ms: 0\r\nx-request-slo-ms: 18446744073709551615\r\n\
            x-cache-affinity-key: a b\r\nx-stargate-max-wait-ms: 7\r\nx-stargate-max-wait-ms: 8\r\ntraceparent: t\r\n\
            connection: x-model, x-priority\r\n";
        with(lines, |headers| {
            let wish = headers.wish(Nanos(5), true).unwrap();
            assert_eq!((wish.arrived, wish.embeddings, wish.input_tokens), (Nanos(5), true, 12));
            assert_eq!(
                (wish.model, wish.routing_key, wish.affinity_key),
                (&b"m 1"[..], &b"k"[..], &b"a b"[..])
            );
            assert_eq!(wish.method, Some(&b"pulsar;seed=a"[..]));
            assert_eq!((wish.priority, wish.max_wait_ms, wish.slo_ms), (u32::MAX, Some(0), Some(u64::MAX)));
            assert_eq!(wish.retry_budget_ms, Some(7));
            assert_eq!(headers.trace_parent, Some(&b"t"[..]));
        });
    }

    #[test]
    fn what_is_not_said_is_absent() {
        let blank = "x-routing-key:  \r\nx-cache-affinity-key:\r\n";
        with(&format!("{REQUIRED}{blank}"), |headers| {
            let wish = headers.wish(Nanos(0), false).unwrap();
            assert_eq!((wish.routing_key, wish.affinity_key, wish.method), (&b""[..], &b""[..], None));
            assert_eq!((wish.priority, wish.max_wait_ms, wish.slo_ms), (0, None, None));
            assert_eq!(wish.retry_budget_ms, None);
        });
        // Texts that are not visible ASCII are absent, too.
        with(&format!("{REQUIRED}x-routing-key: é\r\n"), |headers| assert_eq!(headers.routing_key(), b""));
    }

    #[test]
    fn the_three_required_headers_are_required() {
        for name in ["x-request-id", "x-input-tokens", "x-model"] {
            for instead in [
                "",
                "y: z\r\n",
                &format!("{name}:\r\n"),
                &format!("{name}:   \r\n"),
                &format!("{name}: é\r\n"),
            ] {
                let lines: String =
                    REQUIRED.split_inclusive("\r\n").filter(|line| !line.starts_with(name)).collect();
                assert_eq!(fault(&format!("{lines}{instead}")), Some(Invalid::Header), "{name} {instead:?}");
            }
        }
        assert_eq!(fault(REQUIRED), None);
    }

    #[test]
    fn numbers_are_plain_and_in_range() {
        let numbers = [
            ("x-priority", "4294967296"),
            ("x-max-wait-ms", "18446744073709551616"),
            ("x-request-slo-ms", "1.5"),
        ];
        for (name, over) in numbers {
            for bad in [over, "", "  ", "-1", "-0", "+", "++1", "1 2", "0x1", "1e3", "é", "1_000", "1,1"] {
                assert_eq!(refused(&format!("{name}: {bad}\r\n")), Some(Invalid::Header), "{name}: {bad}");
            }
            for good in ["0", "+1", "007", "4294967295"] {
                assert_eq!(refused(&format!("{name}: {good}\r\n")), None, "{name}: {good}");
            }
        }
        for bad in ["bad", "-1", ""] {
            assert_eq!(
                fault(&format!("x-request-id: r\r\nx-model: m\r\nx-input-tokens: {bad}\r\n")),
                Some(Invalid::Header)
            );
            with(&format!("{REQUIRED}x-stargate-max-wait-ms: {bad}\r\n"), |headers| {
                assert_eq!(headers.retry_budget_ms(), Err(Invalid::Header), "{bad}");
                assert!(headers.wish(Nanos(0), false).is_ok(), "it is looked at later");
            });
        }
    }

    #[test]
    fn an_unreadable_method_comes_before_the_optional_numbers_and_after_the_required_ones() {
        let bad_method = "x-routing-method: pulsar;seed\r\n";
        let code = |invalid: Option<Invalid>| match invalid {
            Some(Invalid::Method(refused)) => Some(refused.code),
            _ => None,
        };
        assert_eq!(code(refused(&format!("{bad_method}x-priority: x\r\n"))), Some(Code::MalformedExpression));
        assert_eq!(
            code(refused("x-routing-method: sticky\r\nx-max-wait-ms: x\r\n")),
            Some(Code::UnknownMethod)
        );
        assert_eq!(refused("x-routing-method: pulsar\r\nx-priority: x\r\n"), Some(Invalid::Header));
        assert_eq!(fault(&format!("x-request-id: r\r\nx-model: m\r\n{bad_method}")), Some(Invalid::Header));
        assert_eq!(refused(bad_method), None, "alone it is found where the algorithm is asked for");
    }

    #[test]
    fn without_a_name_there_is_no_budget() {
        let text = format!("POST / HTTP/1.1\r\nHost: a\r\n{REQUIRED}x-stargate-max-wait-ms: bad\r\n\r\n");
        let mut head = RequestHead::default();
        let limits = HeadLimits::new(65_536, b"");
        parse_request(text.as_bytes(), &mut HeadScan::default(), &limits, &mut head).unwrap();
        assert_eq!(Headers::read(&head, text.as_bytes(), b"").retry_budget_ms(), Ok(None));
    }
}
