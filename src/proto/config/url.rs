//! Where a server listens, as its `url` says it.
//!
//! *Errors*: what was expected; credentials in a URL are never repeated in an error.
//! *Source*: RFC 3986 sections 3.2 and 3.3 for what a host and a path may hold.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::proto::backend::catalog::Address;

/// Longest path of a Unix socket that the kernel takes, in bytes.
const UNIX_PATH_BYTES_MAX: usize = 107;

/// A parsed `url`. Its `Display` form parses to the same again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ServerUrl {
    Http {
        host: Host,
        port: u16,
        /// Path in front of every target, without a trailing slash; empty for most.
        base_path: String,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// A host: an address, or a name that somebody has to resolve.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    Ip(IpAddr),
    /// Lower case.
    Name(String),
}

const EXPECTED: &str = "expected http://HOST[:PORT][/BASE] or unix:/PATH";

impl ServerUrl {
    /// Reads a URL. The error says what was expected.
    pub fn parse(text: &str) -> Result<ServerUrl, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return ServerUrl::parse_unix(path);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            // Whoever leaves the scheme out mostly means this.
            let meant = format!("http://{text}");
            return Err(match ServerUrl::parse(&meant) {
                Ok(_) => format!("{EXPECTED}; is \"{meant}\" meant?"),
                Err(_) => EXPECTED.into(),
            });
        };
        if scheme.eq_ignore_ascii_case("https") {
            return Err(
                "https is not in this version; expected http://HOST[:PORT][/BASE] or unix:/PATH".into()
            );
        }
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(EXPECTED.into());
        }
        let (authority, base) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(format!("{EXPECTED}, without user or password"));
        }
        if base.contains(['?', '#']) {
            return Err(format!("{EXPECTED}, without \"?\" or \"#\""));
        }
        if !base.bytes().all(|b| (0x21..=0x7e).contains(&b) && !b"\"<>\\^`{|}".contains(&b)) {
            return Err(format!("{EXPECTED}, other characters percent-encoded"));
        }
        let (host, port) = parse_authority(authority)?;
        Ok(ServerUrl::Http { host, port, base_path: base.trim_end_matches('/').to_owned() })
    }

    fn parse_unix(path: &str) -> Result<ServerUrl, String> {
        // Also the form with an empty authority, unix:///path.
        let path = if path.starts_with("///") { &path[2..] } else { path };
        if path.is_empty() || path.ends_with('/') || path.contains('\0') {
            return Err("expected unix:/PATH of a socket".into());
        }
        if path.len() > UNIX_PATH_BYTES_MAX {
            return Err(format!("expected unix:/PATH of at most {UNIX_PATH_BYTES_MAX} bytes"));
        }
        Ok(ServerUrl::Unix(PathBuf::from(path)))
    }

    /// A relative socket path becomes one under `dir`; others stay.
    pub fn under(self, dir: &Path) -> Result<ServerUrl, String> {
        match self {
            ServerUrl::Unix(path) if path.is_relative() => {
                let joined = dir.join(path);
                if joined.as_os_str().len() > UNIX_PATH_BYTES_MAX {
                    return Err(format!(
                        "expected unix:/PATH of at most {UNIX_PATH_BYTES_MAX} bytes; relative to the file it is {}",
                        joined.display()
                    ));
                }
                Ok(ServerUrl::Unix(joined))
            }
            other => Ok(other),
        }
    }

    /// Where to connect. `None`: the host is a name, to be resolved.
    pub fn address(&self) -> Option<Address> {
        match self {
            ServerUrl::Http { host: Host::Ip(ip), port, .. } => {
                Some(Address::Tcp(SocketAddr::new(*ip, *port)))
            }
            ServerUrl::Http { .. } => None,
            ServerUrl::Unix(path) => Some(Address::Unix(path.clone())),
        }
    }

    /// Name and port to resolve. `None`: nothing is to be resolved.
    pub fn unresolved(&self) -> Option<(&str, u16)> {
        match self {
            ServerUrl::Http { host: Host::Name(name), port, .. } => Some((name, *port)),
            _ => None,
        }
    }

    /// Value of the `Host` header: the port is left out where it is 80.
    pub fn host_header(&self) -> String {
        match self {
            ServerUrl::Http { host, port: 80, .. } => host.to_string(),
            ServerUrl::Http { host, port, .. } => format!("{host}:{port}"),
            ServerUrl::Unix(_) => "localhost".to_owned(),
        }
    }

    /// Path in front of every target, without a trailing slash.
    pub fn base_path(&self) -> &str {
        match self {
            ServerUrl::Http { base_path, .. } => base_path,
            ServerUrl::Unix(_) => "",
        }
    }

    /// A server name for a URL that has none: `HOST:PORT`, or the socket's file name.
    pub fn default_name(&self) -> String {
        match self {
            ServerUrl::Http { host, port, .. } => format!("{host}:{port}"),
            ServerUrl::Unix(path) => {
                let file = path.file_name().map_or_else(|| "unix".into(), |name| name.to_string_lossy());
                file.chars()
                    .map(|c| if c.is_ascii() && super::pools::name_byte(c as u8) { c } else { '_' })
                    .collect()
            }
        }
    }
}

fn parse_authority(authority: &str) -> Result<(Host, u16), String> {
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (ip, port) = rest.split_once(']').ok_or(EXPECTED)?;
        let ip: Ipv6Addr =
            ip.parse().map_err(|_| format!("{EXPECTED}, an IPv6 address between \"[\" and \"]\""))?;
        (Host::Ip(IpAddr::V6(ip)), port)
    } else {
        let (name, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
        (parse_name(name)?, port)
    };
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => 80,
        // "+80" would parse as a number.
        Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
            digits.parse().ok().filter(|port| *port != 0).ok_or("expected a port from 1 to 65535")?
        }
        _ => return Err(format!("{EXPECTED}, a port from 1 to 65535")),
    };
    Ok((host, port))
}

fn parse_name(name: &str) -> Result<Host, String> {
    if let Ok(ip) = name.parse::<Ipv4Addr>() {
        return Ok(Host::Ip(IpAddr::V4(ip)));
    }
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let labels = name.strip_suffix('.').unwrap_or(name);
    // A last label of digits alone is a mistyped address (RFC 3696 section 2), which a resolver would read in its own way.
    let numeric_end = labels.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    if name.len() > 253 || !labels.split('.').all(label) || numeric_end {
        return Err(format!("{EXPECTED}, a host name or an IP address"));
    }
    Ok(Host::Name(name.to_ascii_lowercase()))
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
            Host::Ip(ip) => write!(f, "{ip}"),
            Host::Name(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerUrl::Http { host, port, base_path } => write!(f, "http://{host}:{port}{base_path}"),
            ServerUrl::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// `text` without what stands before an `@`: faults show URLs, never passwords.
pub(super) fn without_credentials(text: &str) -> String {
    let start = text.find("://").map_or(0, |at| at + 3);
    match text[start..].rfind('@') {
        Some(at) => format!("{}…@{}", &text[..start], &text[start + at + 1..]),
        None => text.to_owned(),
    }
}
