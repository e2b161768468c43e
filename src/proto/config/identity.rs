//! The texts by which the Stargate family knows servers, clusters and routing keys: what each may hold.
//!
//! They travel in header values, so all are visible ASCII; a text that no request could name would be of no use.
//!
//! *Errors*: what was expected.
//! *Source*: the Stargate rules, sections 4.2 and 4.3.

/// Longest of these texts, in bytes.
pub const TEXT_BYTES_MAX: usize = 256;
/// Longest model id, in bytes.
pub const MODEL_BYTES_MAX: usize = 1_024;

fn visible(text: &str) -> bool {
    text.bytes().all(|b| (0x21..=0x7e).contains(&b))
}

/// Inner spaces are fine, outer ones would be trimmed off a header's value.
fn is_header_text(text: &str) -> bool {
    text.bytes().all(|b| (0x20..=0x7e).contains(&b)) && text.trim() == text
}

/// A registration's id: the server's name.
pub fn server_id(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > TEXT_BYTES_MAX || !visible(text) {
        return Err(format!(
            "expected an id of 1 to {TEXT_BYTES_MAX} visible ASCII characters without spaces"
        ));
    }
    Ok(())
}

/// A capacity domain; empty: the server's own.
pub fn cluster_id(text: &str) -> Result<(), String> {
    if text.len() > TEXT_BYTES_MAX || !visible(text) {
        return Err(format!(
            "expected a cluster of at most {TEXT_BYTES_MAX} visible ASCII characters without spaces; empty: the server's own"
        ));
    }
    Ok(())
}

/// A routing key; empty: none.
pub fn routing_key(text: &str) -> Result<(), String> {
    if text.len() > TEXT_BYTES_MAX || !is_header_text(text) {
        return Err(format!(
            "expected a routing key of at most {TEXT_BYTES_MAX} visible ASCII characters, no space at its ends"
        ));
    }
    Ok(())
}

/// One of several routing keys.
pub fn some_routing_key(text: &str) -> Result<(), String> {
    match text {
        "" => Err("expected a routing key; leave the list empty for requests without one".to_owned()),
        text => routing_key(text),
    }
}

/// An exact model id.
pub fn model(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > MODEL_BYTES_MAX || text.chars().any(char::is_control) {
        return Err(format!("expected a model name of 1 to {MODEL_BYTES_MAX} bytes"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_what_a_header_can_carry() {
        let long = "k".repeat(TEXT_BYTES_MAX + 1);
        for bad in ["a b", "é", "a\n", long.as_str()] {
            assert!(server_id(bad).is_err() && cluster_id(bad).is_err(), "{bad:?}");
        }
        assert!(server_id("").is_err() && cluster_id("").is_ok());
        for good in ["10.0.0.1:8000", "pod/a_b", "~", &long[1..]] {
            assert!(
                server_id(good).is_ok() && cluster_id(good).is_ok() && routing_key(good).is_ok(),
                "{good:?}"
            );
        }
        for bad in [" a", "a ", "a\tb", "é", long.as_str()] {
            assert!(routing_key(bad).is_err(), "{bad:?}");
        }
        assert!(routing_key("fn 1").is_ok() && routing_key("").is_ok() && some_routing_key("").is_err());
        assert!(model("").is_err() && model("m\u{7}").is_err() && model("org/modèle").is_ok());
    }
}
