use super::*;

fn decode(input: &[u8]) -> Result<(Vec<u8>, bool, ChunkedDecoder), &'static str> {
    let mut decoder = ChunkedDecoder::default();
    let (mut data, mut at) = (Vec::new(), 0);
    while at < input.len() && !decoder.is_done() {
        let decoded = decoder.decode(&input[at..]).map_err(|e| e.what)?;
        data.extend_from_slice(&input[at..][decoded.data]);
        at += decoded.consumed;
    }
    let done = decoder.is_done();
    Ok((data, done, decoder))
}

#[test]
fn one_call_yields_one_run_of_data_and_its_line_end() {
    let input = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\nGET";
    let mut decoder = ChunkedDecoder::default();
    assert_eq!(decoder.decode(input), Ok(Decoded { consumed: 8, data: 3..6, done: false }));
    assert_eq!(decoder.decode(&input[8..]), Ok(Decoded { consumed: 7, data: 3..5, done: false }));
    assert_eq!(decoder.decode(&input[15..]), Ok(Decoded { consumed: 5, data: 5..5, done: true }));
    assert_eq!(decoder.decode(b"GET"), Ok(Decoded { consumed: 0, data: 0..0, done: true }));
}

#[test]
fn good_data_before_a_fault_is_delivered_first() {
    let mut decoder = ChunkedDecoder::default();
    assert_eq!(decoder.decode(b"3\r\nabcX"), Ok(Decoded { consumed: 6, data: 3..6, done: false }));
    assert_eq!(decoder.decode(b"X").unwrap_err().what, "chunk data is not followed by CRLF");
    assert!(decoder.decode(b"0\r\n\r\n").is_err() && decoder.advance(b"0\r\n\r\n").is_err());
    assert!(!decoder.is_done());
}

#[test]
fn sizes_up_to_the_largest() {
    let (_, done, decoder) = decode(b"ffffffffffffffff\r\nabc").unwrap();
    assert!(!done);
    assert_eq!(decoder.remaining, u64::MAX - 3);
    assert_eq!(decode(b"00000000000000000000000a\r\n0123456789\r\n0\r\n\r\n").unwrap().0, b"0123456789");
    assert!(decode(b"10000000000000000").unwrap_err().contains("2^64"), "at the digit that is too much");
}

#[test]
fn extensions_follow_the_grammar() {
    let with = |extension: &str| decode(format!("1{extension}\r\na\r\n0{extension}\r\n\r\n").as_bytes());
    for good in
        [";a", ";a=b", ";a=\"\"", "; a = b", ";a;b", ";a=\"x;\\\"y\\\\\" ; b", ";\ta", ";a=\"\u{e9}\""]
    {
        let (data, done, _) = with(good).unwrap_or_else(|what| panic!("{good:?}: {what}"));
        assert_eq!((data, done), (b"a".to_vec(), true), "{good:?}");
    }
    for bad in [
        ";",
        "; ",
        ";;",
        ";a;",
        ";a=",
        ";a= ",
        ";=b",
        ";a=\"",
        ";a=\"x\\\"",
        ";a=\"x\"y",
        ";a b",
        ";a=b c",
        ";a ",
        ";a=b ",
        ";a=\"b\" ",
        ";a=\"\x01\"",
        ";a=\"\\\x7f\"",
        ";\u{e9}",
        " ",
        "a;b@",
        ";a=b=c",
    ] {
        assert!(with(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn size_lines_have_a_bound() {
    // `1;` and the name are CHUNK_LINE_BYTES_MAX together.
    let with = |n: usize| decode(format!("1;{}\r\na\r\n0\r\n\r\n", "n".repeat(n - 2)).as_bytes());
    assert!(with(CHUNK_LINE_BYTES_MAX).unwrap().1);
    assert!(with(CHUNK_LINE_BYTES_MAX + 1).unwrap_err().contains("over 4096"));
    // The bound is one line's, not the body's.
    let many = format!("1;{}\r\na\r\n", "n".repeat(3000)).repeat(3) + "0\r\n\r\n";
    assert!(decode(many.as_bytes()).unwrap().1);
    assert!(decode("0".repeat(CHUNK_LINE_BYTES_MAX + 1).as_bytes()).is_err(), "also for zeros");
}

#[test]
fn trailers_have_a_bound_whether_kept_or_not() {
    for name in ["A", "Host"] {
        let with = |n: usize| {
            let line = format!("{name}: {}\r\n", "v".repeat(94 - name.len()));
            decode(format!("0\r\n{}\r\n", line.repeat(n)).as_bytes())
        };
        let lines = TRAILER_BYTES_MAX / 97;
        assert!(with(lines).unwrap().1, "{name}");
        assert!(with(lines + 1).unwrap_err().contains("over 16384"), "{name}");
    }
}

#[test]
fn trailers_keep_what_may_go_on() {
    let input = b"0\r\nX-Sum: 1\r\nContent-Length: 3\r\ntransfer-encoding: chunked\r\nHOST: a\r\nAuthorization: b\r\nSet-Cookie: c\r\n\
        Connection: x\r\nTrailer: y\r\nx-sum:\t\xff \r\nEmpty:\r\n\r\n";
    let (data, done, decoder) = decode(input).unwrap();
    assert!(data.is_empty() && done && decoder.had_trailers());
    assert_eq!(decoder.trailers(), b"X-Sum: 1\r\nx-sum:\t\xff \r\nEmpty:\r\n");
}

#[test]
fn no_memory_is_allocated_without_trailers() {
    let (_, done, decoder) = decode(b"5;a=b\r\nhello\r\n0\r\n\r\n").unwrap();
    assert!(done && !decoder.had_trailers());
    assert_eq!(decoder.trailers.capacity(), 0);
}
