//! Routing expressions: the value of `x-routing-method`, an algorithm's name with or without parameters.
//!
//! `pulsar` names an algorithm, in any case and with `_` for `-`. `pulsar;seed=stable-a` lays settings over the model's entry for it. A
//! value with a `;` is an Item with Parameters of RFC 8941, and narrower: no comma, no `;` in a string, plain names that appear
//! once, and neither `?1` nor bytes for a value.
//!
//! *Invariant*: a value is refused for the first rule that it breaks, in the order of the rules: format, algorithm, then its
//! parameters one by one as they were written, then the queue-time pair. Nothing of a refused value has an effect.
//! *Bound and cost*: [`EXPRESSION_BYTES_MAX`] and [`EXPRESSION_PARAMETERS_MAX`]; linear in the value but for the search for a repeated
//! name. A bare name allocates nothing.
//! *Errors*: [`Refused`]: one of eight codes, and a sentence that names the parameter or value.
//! *Source*: the Stargate rules, section 3.

pub mod sfv;

use super::fault::shorten;
use super::lb_config::field::{Field, Kind, Setting};
use super::lb_config::{Comparator, Entry, Method};
use crate::limits::{EXPRESSION_BYTES_MAX, EXPRESSION_PARAMETERS_MAX, EXPRESSION_VIRTUAL_NODES_MAX};
use sfv::{Bare, Parameter};

/// Why a value is refused, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    MalformedExpression,
    UnknownMethod,
    Unavailable,
    UnknownParameter,
    NotApplicable,
    InvalidValue,
    InertValue,
    InertCombination,
}

impl Code {
    pub const ALL: [Code; 8] = [
        Code::MalformedExpression,
        Code::UnknownMethod,
        Code::Unavailable,
        Code::UnknownParameter,
        Code::NotApplicable,
        Code::InvalidValue,
        Code::InertValue,
        Code::InertCombination,
    ];

    /// As `x-stargate-error-code` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Code::MalformedExpression => "malformed_expression",
            Code::UnknownMethod => "unknown_method",
            Code::Unavailable => "unavailable",
            Code::UnknownParameter => "unknown_parameter",
            Code::NotApplicable => "not_applicable",
            Code::InvalidValue => "invalid_value",
            Code::InertValue => "inert_value",
            Code::InertCombination => "inert_combination",
        }
    }
}

/// A refused value. The message is one line, not yet escaped for JSON; what it quotes is shortened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub code: Code,
    pub message: String,
}

impl Refused {
    fn new(code: Code, message: impl Into<String>) -> Refused {
        Refused { code, message: message.into() }
    }

    /// For a method that [`LbConfig::resolve`](super::lb_config::LbConfig::resolve) has no entry of.
    pub fn unavailable(method: Method) -> Refused {
        Refused::new(
            Code::Unavailable,
            format!("algorithm {} is not configured for the model", method.name()),
        )
    }
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Requested<'a> {
    /// The model's entry for it, as it stands.
    Name(Method),
    Expression(Expression<'a>),
}

impl Requested<'_> {
    pub const fn method(&self) -> Method {
        match self {
            Requested::Name(method) => *method,
            Requested::Expression(expression) => expression.method,
        }
    }
}

/// A well-formed expression, whose parameters have not been looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Expression<'a> {
    method: Method,
    /// Unique names; no Boolean and no Bytes.
    parameters: Vec<Parameter<'a>>,
}

/// Whether the value is an expression, rather than a name: only then is there anything to compile, and to keep.
pub fn is_expression(value: &[u8]) -> bool {
    memchr::memchr(b';', value).is_some()
}

/// Reads a header's value: its format and the algorithm's name.
pub fn parse(value: &[u8]) -> Result<Requested<'_>, Refused> {
    if !value.iter().all(|b| matches!(b, b' '..=b'~' | b'\t')) {
        return Err(Refused::new(Code::UnknownMethod, "the value is not visible ASCII text"));
    }
    if !is_expression(value) {
        return method(value).map(Requested::Name);
    }
    let malformed = |why: String| Refused::new(Code::MalformedExpression, why);
    check_whole(value).and_then(|()| check_parameters(value)).map_err(malformed)?;
    let item = sfv::parse(value).map_err(|fault| {
        let rest = match show(&value[fault.at..]) {
            rest if rest.is_empty() => "the end".to_owned(),
            rest => format!("'{rest}'"),
        };
        malformed(format!("at byte {}, {rest}: expected {}", fault.at + 1, fault.expected))
    })?;
    let name = match item.value {
        Bare::Token(name) if is_plain_token(name) => name,
        _ => {
            let head = value.split(|b| *b == b';').next().expect("split gives at least one piece");
            return Err(malformed(format!(
                "'{}' is no name of an algorithm: expected a letter, then letters, digits, '_' and '-'",
                show(head.trim_ascii())
            )));
        }
    };
    for parameter in &item.parameters {
        let instead = match parameter.value {
            Bare::Boolean(_) => "true or false",
            Bare::Bytes(_) => "a quoted string",
            Bare::Integer(_) | Bare::Decimal(_) | Bare::Token(_) | Bare::String(_) => continue,
        };
        return Err(malformed(format!(
            "parameter '{}': {}: expected {instead}",
            shorten(parameter.name),
            shorten(parameter.text)
        )));
    }
    let method = method(name.as_bytes())?;
    Ok(Requested::Expression(Expression { method, parameters: item.parameters }))
}

fn show(bytes: &[u8]) -> String {
    shorten(&String::from_utf8_lossy(bytes))
}

fn method(value: &[u8]) -> Result<Method, Refused> {
    Method::parse_header(value).ok_or_else(|| {
        let names = Method::ALL.map(Method::name).join(", ");
        let message = match show(value.trim_ascii()) {
            blank if blank.is_empty() => format!("no algorithm is named: expected one of {names}"),
            unknown => format!("unknown algorithm '{unknown}': expected one of {names}"),
        };
        Refused::new(Code::UnknownMethod, message)
    })
}

fn is_plain_token(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

fn check_whole(value: &[u8]) -> Result<(), String> {
    if value.len() > EXPRESSION_BYTES_MAX {
        return Err(format!("{} bytes: expected at most {EXPRESSION_BYTES_MAX}", value.len()));
    }
    if let Some(at) = memchr::memchr(b',', value) {
        return Err(format!("a comma at byte {}: expected none, quoted or not", at + 1));
    }
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in value.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b';' if quoted => {
                return Err(format!("a ';' at byte {}, inside a quoted string: expected none there", at + 1));
            }
            _ => {}
        }
    }
    Ok(())
}

/// No `;` is quoted by now, so each one starts a parameter.
fn check_parameters(value: &[u8]) -> Result<(), String> {
    let mut names: Vec<&[u8]> = Vec::new();
    for parameter in value.split(|b| *b == b';').skip(1) {
        let parameter = &parameter[parameter.iter().take_while(|b| **b == b' ').count()..];
        if names.len() == EXPRESSION_PARAMETERS_MAX {
            return Err(format!("more than {EXPRESSION_PARAMETERS_MAX} parameters"));
        }
        let Some(end) = memchr::memchr(b'=', parameter) else {
            return Err(format!(
                "parameter {}, '{}': expected name=value",
                names.len() + 1,
                show(parameter.trim_ascii())
            ));
        };
        let name = &parameter[..end];
        let is_name = name.first().is_some_and(u8::is_ascii_lowercase)
            && name.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'_');
        if !is_name {
            return Err(format!(
                "parameter name '{}': expected a lowercase letter, then lowercase letters, digits and '_', up to the '='",
                show(name)
            ));
        }
        if names.contains(&name) {
            return Err(format!("parameter '{}' appears twice: expected each once", show(name)));
        }
        names.push(name);
    }
    Ok(())
}

impl Expression<'_> {
    pub const fn method(&self) -> Method {
        self.method
    }

    /// The entry that the parameters make of `base`, the model's entry for this method.
    ///
    /// # Panics
    /// With an entry of another method.
    pub fn compile(&self, base: &Entry) -> Result<Entry, Refused> {
        assert_eq!(base.method(), self.method, "the base is the model's entry for the expression's method");
        let mut entry = base.clone();
        let mut bound = None;
        for parameter in &self.parameters {
            let field = self.field(parameter)?;
            let setting = setting(field, parameter).map_err(|(code, expected)| {
                let effect = if code == Code::InertValue { " would have no effect" } else { "" };
                let (name, text) = (parameter.name, shorten(parameter.text));
                Refused::new(code, format!("parameter '{name}': {text}{effect}: expected {expected}"))
            })?;
            entry.set(field, setting);
            match field {
                Field::MaxQueueTimeFloorMs => bound = Some((field, Field::MaxQueueTimeCeilMs)),
                Field::MaxQueueTimeCeilMs => bound = Some((field, Field::MaxQueueTimeFloorMs)),
                _ => {}
            }
        }
        if let Some((named, other)) = bound
            && entry.widen().is_some_and(|widen| widen.queue_time_ms().is_none())
        {
            let (named, other) = (named.name(), other.name());
            let message =
                format!("parameter '{named}' would have no effect alone: expected {other} to be set too");
            return Err(Refused::new(Code::InertCombination, message));
        }
        Ok(entry)
    }

    fn field(&self, parameter: &Parameter<'_>) -> Result<Field, Refused> {
        let method = self.method.name();
        let Some(field) = Field::parse(parameter.name).filter(|field| !field.in_expression().is_empty())
        else {
            let name = shorten(parameter.name);
            let message = format!("unknown parameter '{name}' for algorithm {method}");
            return Err(Refused::new(Code::UnknownParameter, message));
        };
        if !field.in_expression().has(self.method) {
            let all = Method::ALL.into_iter().filter(|method| field.in_expression().has(*method));
            let all: Vec<&str> = all.map(Method::name).collect();
            let name = parameter.name;
            let message =
                format!("parameter '{name}' does not apply to {method}: only to {}", all.join(" and "));
            return Err(Refused::new(Code::NotApplicable, message));
        }
        Ok(field)
    }
}

/// The value of a field, or why not and what was expected.
fn setting(field: Field, parameter: &Parameter<'_>) -> Result<Setting, (Code, String)> {
    let invalid = |expected: &str| (Code::InvalidValue, expected.to_owned());
    let text = match &parameter.value {
        Bare::Token(text) => Some(*text),
        Bare::String(text) => Some(text.as_ref()),
        _ => None,
    };
    Ok(match field.kind() {
        Kind::Flag => match text {
            Some("true") => Setting::Flag(true),
            Some("false") => Setting::Flag(false),
            _ => return Err(invalid("true or false")),
        },
        Kind::Uint => Setting::Uint(read_uint(field, &parameter.value)?),
        Kind::Number => Setting::Number(read_number(field, &parameter.value)?),
        Kind::Text => Setting::Text(text.ok_or_else(|| invalid("a token or a quoted string"))?.into()),
        Kind::Comparator => {
            let known = text.and_then(Comparator::parse);
            Setting::Comparator(known.ok_or_else(|| {
                invalid(&format!("one of {}", Comparator::ALL.map(Comparator::name).join(", ")))
            })?)
        }
        Kind::Weight | Kind::Structure => unreachable!("no expression knows {}", field.name()),
    })
}

fn read_uint(field: Field, value: &Bare<'_>) -> Result<u64, (Code, String)> {
    let n = match value {
        Bare::Integer(n) => u64::try_from(*n).ok(),
        Bare::String(text) if is_plain_number(text) => text.parse().ok(),
        _ => None,
    };
    let (least, most) = match field {
        Field::SampleCount => (1, 64),
        Field::VirtualNodes => (1, EXPRESSION_VIRTUAL_NODES_MAX),
        Field::N | Field::TtftBucketSizeMs | Field::Group => (1, u64::MAX),
        _ => (0, u64::MAX),
    };
    match n {
        Some(n) if (least..=most).contains(&n) => Ok(n),
        // One of its own range: 0 is as wrong as 65 there.
        Some(0) if field != Field::SampleCount => {
            Err((Code::InertValue, "a whole number above 0".to_owned()))
        }
        _ if most == u64::MAX && least == 0 => {
            Err((Code::InvalidValue, "a whole number, 0 or greater".to_owned()))
        }
        _ if most == u64::MAX => Err((Code::InvalidValue, "a whole number above 0".to_owned())),
        _ => Err((Code::InvalidValue, format!("a whole number from {least} to {most}"))),
    }
}

fn read_number(field: Field, value: &Bare<'_>) -> Result<f64, (Code, String)> {
    let number = match value {
        Bare::Integer(n) => Some(*n as f64),
        Bare::Decimal(x) => Some(*x),
        Bare::String(text) if is_plain_number(text) => text.parse().ok().filter(|x: &f64| x.is_finite()),
        _ => None,
    };
    // Adding zero turns -0.0 into 0.0, which would else show as "-0.0".
    let number = number.map(|x| x + 0.0);
    let invalid = |expected: &str| Err((Code::InvalidValue, expected.to_owned()));
    match (field, number) {
        (Field::MaxInputWorkSeconds, Some(x)) if x <= 0.0 => {
            Err((Code::InertValue, "a number above 0".to_owned()))
        }
        (Field::MaxInputWorkSeconds, None) => invalid("a number above 0"),
        (Field::CacheAffinityInputTokensScale, Some(x)) if !(0.0..=1.0).contains(&x) => {
            invalid("a number from 0.0 to 1.0")
        }
        (Field::CacheAffinityInputTokensScale, None) => invalid("a number from 0.0 to 1.0"),
        (_, Some(x)) => Ok(x),
        (_, None) => invalid("a number"),
    }
}

/// A sign, digits, and perhaps a point with digits behind it: no exponent, no infinity, no spaces.
fn is_plain_number(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let text = text.strip_prefix(['+', '-']).unwrap_or(text);
    match text.split_once('.') {
        Some((whole, part)) => digits(whole) && digits(part),
        None => digits(text),
    }
}

#[cfg(test)]
mod tests;
