use super::*;

#[test]
fn searches_agree_with_a_byte_loop_at_every_offset() {
    // All byte values, so that look-alikes of brackets and of quotes under the bit tricks are met.
    let noise: Vec<u8> = (0..=255).chain((0..=255).rev()).collect();
    let structural = |b: &u8| matches!(b, b'"' | b'{' | b'[' | b'}' | b']');
    for from in 0..noise.len() {
        let rest = &noise[from..];
        let quote = rest.iter().position(|b| *b == b'"').map(|at| from + at);
        assert_eq!(find_quote(&noise, from), quote, "{from}");
        assert_eq!(
            find_structural(&noise, from),
            rest.iter().position(structural).map(|at| from + at),
            "{from}"
        );
    }
    assert_eq!((find_quote(b"", 0), find_structural(b"", 0)), (None, None));
    // A borrow of the zero-byte trick marks 0x23 above 0x22; the mark must not pass for a hit.
    assert_eq!(find_quote(b"########\"\"##", 0), Some(8));
    assert_eq!(find_structural(b"....y_Y\x7f~|z\\{", 0), Some(12));
}
