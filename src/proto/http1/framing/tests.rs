use super::*;
use crate::proto::http1::{HeadLimits, HeadScan, parse_response};

fn response(text: &str, method: Method) -> (Framing, bool) {
    let mut head = ResponseHead::default();
    let limits = HeadLimits::new(65536, b"");
    parse_response(text.as_bytes(), &mut HeadScan::default(), &limits, method, &mut head).unwrap();
    (head.framing, head.keep_alive)
}

/// RFC 9112 section 6.3, rule by rule.
#[test]
fn response_framing_in_the_order_of_the_rfc() {
    for declared in ["", "Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"] {
        for status in [100, 103, 199, 204] {
            let text = format!("HTTP/1.1 {status} x\r\n{declared}\r\n");
            assert_eq!(response(&text, Method::Get), (Framing::None, declared.is_empty()), "{text:?}");
        }
        let text = format!("HTTP/1.1 304 x\r\n{declared}\r\n");
        assert_eq!(response(&text, Method::Get), (Framing::None, true));
        let text = format!("HTTP/1.1 200 x\r\n{declared}\r\n");
        assert_eq!(response(&text, Method::Head), (Framing::None, true));
    }
    let get = |fields: &str| response(&format!("HTTP/1.1 200 x\r\n{fields}\r\n"), Method::Post);
    assert_eq!(get("Transfer-Encoding: CHUNKED\r\n"), (Framing::Chunked, true));
    assert_eq!(get("Content-Length: 0\r\n"), (Framing::Length(0), true));
    assert_eq!(get("Content-Length: 18446744073709551615\r\n"), (Framing::Length(u64::MAX), true));
    assert_eq!(get(""), (Framing::UntilClose, false));
    assert_eq!(get("Connection: keep-alive\r\n"), (Framing::UntilClose, false));
}

#[test]
fn lengths_are_digits_only() {
    for (value, length) in [
        ("0", Some(0)),
        ("007", Some(7)),
        ("18446744073709551615", Some(u64::MAX)),
        ("18446744073709551616", None),
        ("184467440737095516150", None),
        ("", None),
        ("+1", None),
        ("-0", None),
        ("1 ", None),
        ("1,1", None),
        ("1e3", None),
        ("\u{661}", None),
    ] {
        assert_eq!(parse_length(value.as_bytes()).ok(), length, "{value:?}");
    }
}

#[test]
fn a_length_body_takes_its_bytes_and_no_more() {
    let mut reader = BodyReader::new(Framing::Length(5));
    assert_eq!(reader.advance(b"abc"), Ok(Advance { consumed: 3, forward: 3, done: false }));
    assert_eq!((reader.remaining(), reader.may_end()), (Some(2), false));
    assert_eq!(reader.decode(b"deGET"), Ok(Decoded { consumed: 2, data: 0..2, done: true }));
    assert_eq!(reader.advance(b"GET"), Ok(Advance { consumed: 0, forward: 0, done: true }));
    assert!(reader.is_done() && reader.may_end() && reader.trailers().is_empty());
}

#[test]
fn no_body_is_done_from_the_start() {
    for framing in [Framing::None, Framing::Length(0)] {
        let mut reader = BodyReader::new(framing);
        assert!(reader.is_done());
        assert_eq!(reader.advance(b"x"), Ok(Advance { consumed: 0, forward: 0, done: true }));
    }
    let chunked = BodyReader::new(Framing::Chunked);
    assert!(!chunked.is_done() && !chunked.may_end());
}

#[test]
fn a_body_until_close_takes_all_and_may_always_end() {
    let mut reader = BodyReader::new(Framing::UntilClose);
    assert_eq!(reader.advance(b"abc"), Ok(Advance { consumed: 3, forward: 3, done: false }));
    assert_eq!(reader.decode(b"d"), Ok(Decoded { consumed: 1, data: 0..1, done: false }));
    assert!(!reader.is_done() && reader.may_end());
}

#[test]
fn the_tail_is_written_only_where_trailers_were() {
    let pass = |input: &[u8]| {
        let mut reader = BodyReader::new(Framing::Chunked);
        let advance = reader.advance(input).unwrap();
        let mut out = input[..advance.forward].to_vec();
        reader.push_tail(&mut out, b"X-Lifeboat-");
        (String::from_utf8(out).unwrap(), advance.consumed, advance.done)
    };
    assert_eq!(pass(b"1\r\na\r\n0\r\n\r\nGET"), ("1\r\na\r\n0\r\n\r\n".into(), 11, true));
    let with = b"1\r\na\r\n0\r\nA: b\r\nHost: evil\r\nx-lifeboat-server: s\r\nB: c\r\n\r\n";
    assert_eq!(pass(with), ("1\r\na\r\n0\r\nA: b\r\nB: c\r\n\r\n".into(), with.len(), true));
    let only_dropped = b"0\r\nContent-Length: 9\r\n\r\n";
    assert_eq!(pass(only_dropped), ("0\r\n\r\n".into(), only_dropped.len(), true));
    assert_eq!(pass(b"0\r\nA: b\r\n"), ("0\r\n".into(), 9, false), "nothing before the end is known");
}
