//! The trace context of an attempt: the caller's trace goes on under a span of the router's own.
//!
//! *Invariant*: a context that cannot be read is no context; what came with it goes no further.
//! *Bound and cost*: 70 bytes per attempt.
//! *Source*: W3C Trace Context, sections 3.2 and 4.3; the Stargate rules, section 4.3.

/// What a `traceparent` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent<'a> {
    /// 32 small hexadecimal digits, not all 0.
    trace_id: &'a [u8],
    /// Those that go on: sampled, and that the trace id is random.
    flags: u8,
}

const PASSED_FLAGS: u8 = 3;
/// Of a trace that begins here: whoever comes next records it unless it is told otherwise, as it would without a context.
const NEW_FLAGS: u8 = 3;

impl<'a> Parent<'a> {
    /// Reads a `traceparent` of this version or a later one.
    pub fn read(value: &'a [u8]) -> Option<Parent<'a>> {
        let (version, rest) = value.split_at_checked(2)?;
        let known = rest.split_at_checked(53)?;
        let (known, later) = known;
        let ends = later.is_empty() || version != b"00" && later[0] == b'-';
        if !is_hex(version) || version == b"ff" || !ends {
            return None;
        }
        let [b'-', trace_id @ .., b'-', _, _] = known else { return None };
        let (trace_id, span) = trace_id.split_at(32);
        let [b'-', span_id @ ..] = span else { return None };
        let flags = &known[51..];
        let zero = |digits: &[u8]| digits.iter().all(|digit| *digit == b'0');
        if ![trace_id, span_id, flags].into_iter().all(is_hex) || zero(trace_id) || zero(span_id) {
            return None;
        }
        Some(Parent { trace_id, flags: (digit(flags[0]) << 4 | digit(flags[1])) & PASSED_FLAGS })
    }
}

fn is_hex(digits: &[u8]) -> bool {
    digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

fn digit(digit: u8) -> u8 {
    match digit {
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'0',
    }
}

/// Appends a `traceparent` line for an attempt: a new span of the parent's trace, or of a new trace.
pub fn push_line(out: &mut Vec<u8>, parent: Option<Parent<'_>>, mut random: impl FnMut() -> u64) {
    out.extend_from_slice(b"traceparent: 00-");
    match parent {
        Some(parent) => out.extend_from_slice(parent.trace_id),
        None => {
            push_hex(out, random());
            push_hex(out, random() | 1);
        }
    }
    out.push(b'-');
    // An id of zeros is none.
    push_hex(out, random().max(1));
    out.extend_from_slice(&[b'-', b'0', b'0' + parent.map_or(NEW_FLAGS, |parent| parent.flags)]);
    out.extend_from_slice(b"\r\n");
}

fn push_hex(out: &mut Vec<u8>, number: u64) {
    for place in (0..16).rev() {
        out.push(b"0123456789abcdef"[(number >> (4 * place) & 0xf) as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn the_trace_goes_on_under_a_new_span() {
        let mut out = Vec::new();
        push_line(&mut out, Parent::read(VALID.as_bytes()), || 0x1234);
        let line = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-0000000000001234-01\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), line);
    }

    #[test]
    fn flags_that_are_not_known_stop_here() {
        let mut out = Vec::new();
        push_line(&mut out, Parent::read(VALID.replace("-01", "-fe").as_bytes()), || 1);
        assert!(out.ends_with(b"-02\r\n"));
    }

    #[test]
    fn without_a_trace_one_begins_and_every_line_can_be_read() {
        for random in [0, 1, u64::MAX] {
            let mut out = Vec::new();
            push_line(&mut out, None, || random);
            let value = out.strip_prefix(b"traceparent: ").unwrap().strip_suffix(b"\r\n").unwrap();
            assert!(Parent::read(value).is_some(), "{}", value.escape_ascii());
        }
    }

    #[test]
    fn only_a_whole_context_is_one() {
        assert!(Parent::read(b"01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-later").is_some());
        assert!(Parent::read(b"01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").is_some());
        let bad = [
            "",
            "00",
            &VALID[..54],
            &format!("{VALID}-later"),
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01x",
            &VALID.replace("00-", "ff-"),
            &VALID.replace("00-", "0G-"),
            &VALID.to_uppercase(),
            &VALID.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &VALID.replace("b7ad6b7169203331", &"0".repeat(16)),
            &VALID.replace("-b7", "_b7"),
            &VALID.replace("-01", "-0g"),
            &VALID.replace("-01", "_01"),
        ];
        for value in bad {
            assert_eq!(Parent::read(value.as_bytes()), None, "{value}");
        }
    }
}
