//! What must hold for any routing expression and any `lb-config.json` at all. The fuzz targets and `tests/properties_expression.rs`
//! share it.

use ringway::limits::{EXPRESSION_BYTES_MAX, EXPRESSION_PARAMETERS_MAX};
use ringway::proto::config::expression::{Code, Refused, Requested, parse, sfv};
use ringway::proto::config::lb_config::{Entry, LbConfig, Method};

/// Bytes of a message, whatever is quoted in it.
const MESSAGE_BYTES_MAX: usize = 1000;

fn check_refused(refused: &Refused, codes: &[Code]) {
    assert!(codes.contains(&refused.code), "{refused:?}");
    assert!(!refused.message.is_empty() && refused.message.len() <= MESSAGE_BYTES_MAX, "{refused:?}");
    assert!(!refused.message.chars().any(char::is_control), "{refused:?}");
}

/// A log line's text, in a file, routes the same.
fn check_effective(entry: &Entry) {
    let text = entry.effective_json();
    let config = LbConfig::parse(format!("{{\"models\":{{\"m\":{text}}}}}").as_bytes())
        .unwrap_or_else(|faults| panic!("{text}: {faults}"));
    let again = config.entry(config.resolve(b"m", None).expect("it is configured"));
    assert_eq!(again.method(), entry.method());
    assert_eq!(again.effective_json(), text);
}

/// A value is a name, an expression, or refused in a sentence; an expression makes of an entry what a file could hold.
pub fn expression(data: &[u8]) {
    let requested = match parse(data) {
        Ok(requested) => requested,
        Err(refused) => return check_refused(&refused, &[Code::MalformedExpression, Code::UnknownMethod]),
    };
    assert!(data.iter().all(|b| matches!(b, b' '..=b'~' | b'\t')));
    let expression = match requested {
        Requested::Name(method) => {
            assert!(!data.contains(&b';'));
            assert_eq!(Method::parse_header(data), Some(method));
            return;
        }
        Requested::Expression(expression) => expression,
    };
    assert!(data.len() <= EXPRESSION_BYTES_MAX && !data.contains(&b','));
    let parameters = data.iter().filter(|b| **b == b';').count();
    assert!((1..=EXPRESSION_PARAMETERS_MAX).contains(&parameters));
    let item = sfv::parse(data).expect("an expression is an item");
    assert_eq!(item.parameters.len(), parameters);
    // Written without a space it is the same.
    let head = data.split(|b| *b == b';').next().expect("there is a piece").trim_ascii();
    let mut dense = String::from_utf8(head.to_vec()).expect("it is ASCII");
    for parameter in &item.parameters {
        dense += &format!(";{}={}", parameter.name, parameter.text);
    }
    let Ok(Requested::Expression(same)) = parse(dense.as_bytes()) else { panic!("{dense}") };
    assert_eq!(same, expression);

    let base = Entry::new(expression.method());
    match expression.compile(&base) {
        Ok(entry) => {
            check_effective(&entry);
            // Laid over itself it changes nothing.
            assert_eq!(expression.compile(&entry), Ok(entry));
        }
        Err(refused) => check_refused(
            &refused,
            &[
                Code::UnknownParameter,
                Code::NotApplicable,
                Code::InvalidValue,
                Code::InertValue,
                Code::InertCombination,
            ],
        ),
    }
}

/// A file is faults, a line each, or entries that are what was asked for.
pub fn lb_config(data: &[u8]) {
    let config = match LbConfig::parse(data) {
        Ok(config) => config,
        Err(faults) => {
            assert!(!faults.is_empty() && faults.len() <= data.len() + 1);
            assert_eq!(faults.to_string().lines().count(), faults.len());
            return;
        }
    };
    let json: serde_json::Value = serde_json::from_slice(data).expect("it was accepted");
    let models = json.get("models").and_then(|models| models.as_object());
    assert_eq!(config.model_overrides(), models.map_or(0, |models| models.len()));
    let names = models.into_iter().flat_map(|models| models.keys()).map(String::as_bytes);
    for model in names.chain([&b"no such model"[..]]) {
        let configured = config.resolve(model, None).expect("something is configured for every model");
        let own = config.entry(configured).method();
        for method in Method::ALL {
            let found = config.resolve(model, Some(method));
            assert!(found.is_none_or(|id| config.entry(id).method() == method));
            assert!(method != own || found == Some(configured));
            found.into_iter().for_each(|id| check_effective(config.entry(id)));
        }
    }
    assert!(Method::parse_file(config.default_name()).is_some());
}
