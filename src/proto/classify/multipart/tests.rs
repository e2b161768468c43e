use super::*;

const TYPE: &[u8] = b"multipart/form-data; boundary=XX";

fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (head, content) in parts {
        body += &format!("--XX\r\n{head}\r\n\r\n{content}\r\n");
    }
    (body + "--XX--\r\n").into_bytes()
}

fn model(content_type: &[u8], body: &[u8]) -> Option<String> {
    peek_multipart(content_type, body).model.map(|m| String::from_utf8(m.into_owned()).unwrap())
}

const AUDIO: (&str, &str) = (
    "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav",
    "RIFF\r\n\r\nname=\"model\"\r\n--XY\r\n--XXY",
);
const MODEL: (&str, &str) = ("Content-Disposition: form-data; name=\"model\"", "whisper-1");
const STREAM: (&str, &str) = ("content-disposition:form-data;name=stream", "true");

#[test]
fn a_transcription_form_says_model_and_stream() {
    for parts in [[AUDIO, MODEL, STREAM], [MODEL, STREAM, AUDIO], [STREAM, AUDIO, MODEL]] {
        let body = form(&parts);
        let found = peek_multipart(TYPE, &body);
        assert_eq!(found.model.as_deref(), Some(&b"whisper-1"[..]));
        assert_eq!((found.stream, found.complete), (Some(true), true));
    }
}

#[test]
fn boundaries_are_found_in_every_spelling() {
    let body = form(&[MODEL]);
    for content_type in [
        "multipart/form-data; boundary=\"XX\"",
        "Multipart/Form-Data ;charset=utf-8; BOUNDARY=XX ; x=y",
        "multipart/form-data; x=\"; boundary=no\"; boundary=XX",
    ] {
        assert_eq!(model(content_type.as_bytes(), &body).as_deref(), Some("whisper-1"), "{content_type}");
    }
    let long = format!("multipart/form-data; boundary={}", "x".repeat(71));
    for content_type in [
        "",
        "application/json",
        "multipart/mixed; boundary=XX",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"XX",
        "multipart/form-data; xboundary=XX",
        "multipart/form-data; boundary=other",
        &long,
    ] {
        assert_eq!(peek_multipart(content_type.as_bytes(), &body), Peek::default(), "{content_type}");
    }
}

#[test]
fn nothing_but_a_plain_fields_own_name_counts() {
    for head in [
        "Content-Disposition: form-data; name=\"file\"; filename=\"x; name=model\"",
        "Content-Disposition: form-data; filename=\"\\\"; name=\\\"model\"; name=\"file\"",
        "Content-Disposition: form-data; name=\"model\"; filename=\"model.bin\"",
        "Content-Disposition: attachment; name=\"model\"",
        "Content-Disposition: form-data; name=\"model2\"",
        "X-Content-Disposition: form-data; name=\"model\"",
        "Content-Type: text/plain; name=\"model\"",
    ] {
        assert_eq!(model(TYPE, &form(&[(head, "no")])), None, "{head}");
    }
    // A part without headers.
    let body = b"--XX\r\n\r\nname=\"model\"\r\n--XX\r\nContent-Disposition: form-data; name=model\r\n\r\nyes\r\n--XX--";
    assert_eq!(model(TYPE, body).as_deref(), Some("yes"));
}

#[test]
fn odd_but_legal_forms_are_read() {
    let twice = form(&[MODEL, ("Content-Disposition: form-data; name=\"model\"", "last")]);
    assert_eq!(model(TYPE, &twice).as_deref(), Some("last"));
    let preamble = [&b"not a part\r\n"[..], &form(&[MODEL])].concat();
    assert_eq!(model(TYPE, &preamble).as_deref(), Some("whisper-1"));
    let padded = b"--XX \t\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n--XX--epilogue";
    assert_eq!(model(TYPE, padded).as_deref(), Some("a"));
    let empty = form(&[("Content-Disposition: form-data; name=\"model\"", "")]);
    assert_eq!(model(TYPE, &empty).as_deref(), Some(""));
    // An empty part may share its line break with the delimiter.
    let shared = b"--XX\r\nContent-Disposition: form-data; name=model\r\n\r\n--XX--";
    assert_eq!(model(TYPE, shared).as_deref(), Some(""));
    let lines = form(&[("Content-Disposition: form-data; name=\"model\"", "a\r\nb\r\n--X")]);
    assert_eq!(model(TYPE, &lines).as_deref(), Some("a\r\nb\r\n--X"));
}

#[test]
fn a_prefix_keeps_what_it_held() {
    let body = form(&[MODEL, AUDIO, STREAM]);
    let model_end = body.windows(9).position(|w| w == b"whisper-1").unwrap() + 9;
    for end in 0..body.len() - 2 {
        let found = peek_multipart(TYPE, &body[..end]);
        // The value counts once its delimiter is all there, and whether it is one shows two bytes later.
        assert_eq!(found.model.is_some(), end >= model_end + b"\r\n--XX\r\n".len(), "{end}");
        assert!(!found.complete, "{end}");
    }
}

#[test]
fn broken_forms_say_nothing_and_end() {
    for body in [
        &b""[..],
        b"--XX",
        b"--XX\r\n",
        b"--XX--",
        b"--XX\nContent-Disposition: form-data; name=model\n\nx\n--XX--",
        b"--XX\r\nContent-Disposition: form-data; name=model",
        b"--XX\r\nContent-Disposition: form-data; name=\"model\r\n\r\nx\r\n--XX--",
        b"\r\n--XX\r\n--XX\r\n--XX\r\n",
    ] {
        assert_eq!(peek_multipart(TYPE, body).model, None, "{}", body.escape_ascii());
    }
    let endless_head =
        [&b"--XX\r\nContent-Disposition: form-data; name=model\r\nX: "[..], &b"x".repeat(20_000)].concat();
    let body = [&endless_head[..], b"\r\n\r\nvalue\r\n--XX--"].concat();
    assert_eq!(peek_multipart(TYPE, &body), Peek::default());
}
