//! `ringway stargate`: Stargate's command line, with its names, defaults and environment variables.
//!
//! Flags of what this version does not have are taken and answered by a warning each, so that a deployment's command line works as it
//! stands. Values go the way of the file's, so that a faulty one is reported like a key's.
//!
//! *Source*: the Stargate rules, sections 4.1 and 4.6; the configuration reference, "command line".

use std::path::{Path, PathBuf};

use clap::Args;

use super::listed;
use crate::proto::config::{Override, Place, Settings, TTL_MS_MAX, TTL_MS_MIN};

/// What the defaults of this command line differ in from the file's.
const BASE: &str = "\
[[listener]]
address = \"0.0.0.0:8000\"
profile = \"stargate\"
[health]
interval_ms = 1000
fall = 1
[stargate]
metrics_address = \"0.0.0.0:9090\"
";

const IDENTITY: &str = "Identity";
const SERVERS: &str = "Servers";
const LISTENERS: &str = "Listeners";
const ROUTING: &str = "Routing";
const RETRIES: &str = "Retries and limits";
const PROCESS: &str = "Process";
const WITHOUT: &str = "Accepted with a warning: without effect in this version";

const STARGATE_HELP: &str = "\
Examples:
  ringway stargate --stargate-id sg-0 --advertise-addr 10.0.0.1:50071 --stargate-discovery-dns-name sg.local \\
      --lb-config-path lb-config.json --backend gpu0=http://10.0.0.10:8000 --backend gpu1=http://10.0.0.11:8000

  curl -X PUT localhost:29000/v1/registrations/gpu2 -d '{\"url\":\"http://10.0.0.12:8000\",\"ttl_ms\":60000,
      \"models\":{\"llama\":{\"status\":\"active\",\"stats\":{}}}}'

Exit codes:
  0  done
  1  anything else: wrong usage or configuration, could not start, drain limit, second signal";

/// `ringway stargate`. `None`: the default.
#[derive(Args, Clone, Debug)]
#[command(after_help = STARGATE_HELP)]
pub struct StargateArgs {
    /// What this router calls itself
    #[arg(long, value_name = "ID", help_heading = IDENTITY)]
    pub stargate_id: String,
    /// Where others would reach it; shown in /debug/state
    #[arg(long, value_name = "ADDR", help_heading = IDENTITY)]
    pub advertise_addr: String,
    /// Name under which routers of this cluster would find each other; shown in /debug/state
    #[arg(long, value_name = "NAME", help_heading = IDENTITY)]
    pub stargate_discovery_dns_name: String,

    /// An engine, as URL or NAME=URL; repeatable. Others may register on the admin listener
    #[arg(long, value_name = "[NAME=]URL", env = "RINGWAY_BACKEND", value_delimiter = ',', help_heading = SERVERS)]
    pub backend: Vec<String>,
    /// Target of the health checks [default: /health]
    #[arg(long, value_name = "PATH", env = "RINGWAY_HEALTH_PATH", help_heading = SERVERS)]
    pub health_path: Option<String>,
    /// How long a registration holds that names no ttl_ms [default: 60000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "STARGATE_REGISTRATION_UPDATE_IDLE_TIMEOUT_MS",
        help_heading = SERVERS
    )]
    pub registration_update_idle_timeout_ms: Option<i64>,
    /// Longest ttl_ms that a registration may name [default: 300000]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MS",
        env = "STARGATE_REGISTRATION_UPDATE_MAX_IDLE_TIMEOUT_MS",
        help_heading = SERVERS
    )]
    pub registration_update_max_idle_timeout_ms: Option<i64>,

    /// Where the gateway connects [default: 0.0.0.0:8000]
    #[arg(long, value_name = "ADDR", help_heading = LISTENERS)]
    pub http_listen_addr: Option<String>,
    /// Port for GET /metrics on every address [default: 9090]
    #[arg(long, value_name = "PORT", help_heading = LISTENERS)]
    pub metrics_port: Option<u16>,
    /// What the names of this family's metrics begin with [default: stargate_]
    #[arg(long, value_name = "PREFIX", help_heading = LISTENERS)]
    pub metrics_prefix: Option<String>,
    /// Where operators and registrations come in: admin API, metrics, health [default: 127.0.0.1:29000]
    #[arg(long, value_name = "ADDR", env = "RINGWAY_ADMIN", help_heading = LISTENERS)]
    pub admin: Option<String>,

    /// The algorithms' file, read once [default: power-of-n, and every algorithm for those who ask]
    #[arg(long, value_name = "FILE", help_heading = ROUTING)]
    pub lb_config_path: Option<PathBuf>,
    /// A target whose last server left less than that ago is 503, not 404; 0: always 404 [default: 900000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = ROUTING)]
    pub deregistered_model_grace_ms: Option<i64>,

    /// Fresh connections for one request after the first failed [default: 2]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "N",
        env = "STARGATE_PROXY_MAX_CONNECT_RETRIES",
        help_heading = RETRIES
    )]
    pub proxy_max_connect_retries: Option<i64>,
    /// Times that one request may go to another server because one said so [default: 2]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "N",
        env = "STARGATE_PROXY_MAX_REQUEST_RETRIES",
        help_heading = RETRIES
    )]
    pub proxy_max_request_retries: Option<i64>,
    /// Bodies up to this are kept for retries [default: 67108864]
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "BYTES",
        env = "STARGATE_PROXY_MAX_REPLAY_BODY_BYTES",
        help_heading = RETRIES
    )]
    pub proxy_max_replay_body_bytes: Option<i64>,
    /// Only an answer with x-stargate-retryable may be tried elsewhere [default: true]
    #[arg(long, value_name = "BOOL", env = "STARGATE_PROXY_REQUIRE_PYLON_RETRY_SIGNAL", help_heading = RETRIES)]
    pub proxy_require_pylon_retry_signal: Option<bool>,
    /// The header that limits the time for retries; empty: none [default: x-stargate-max-wait-ms]
    #[arg(long, value_name = "NAME", env = "STARGATE_PROXY_RETRY_BUDGET_HEADER", help_heading = RETRIES)]
    pub proxy_retry_budget_header: Option<String>,
    /// To open a connection to a server [default: 2000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = RETRIES)]
    pub quic_connect_timeout_ms: Option<i64>,
    /// From the start of an attempt to its response head [default: 30000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = RETRIES)]
    pub quic_request_timeout_ms: Option<i64>,
    /// How long running requests may take to finish on shutdown [default: 30000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = RETRIES)]
    pub shutdown_drain_timeout_ms: Option<i64>,

    /// Cores that get a shard, such as 0-3,5, or all [default: all allowed]
    #[arg(long, value_name = "LIST", env = "RINGWAY_CORES", help_heading = PROCESS)]
    pub cores: Option<String>,
    /// auto (default), io_uring or epoll
    #[arg(long, value_name = "NAME", env = "RINGWAY_DRIVER", help_heading = PROCESS)]
    pub driver: Option<String>,
    /// error, warn, info (default), debug or trace
    #[arg(long, value_name = "LEVEL", env = "RINGWAY_LOG_LEVEL", help_heading = PROCESS)]
    pub log_level: Option<String>,
    /// text (default) or json
    #[arg(long, value_name = "FORMAT", env = "RINGWAY_LOG_FORMAT", help_heading = PROCESS)]
    pub log_format: Option<String>,

    /// Registrations over gRPC [default: 0.0.0.0:50071]
    #[arg(long, value_name = "ADDR", help_heading = WITHOUT)]
    pub listen_addr: Option<String>,
    /// Model discovery over gRPC [default: 0.0.0.0:50073]
    #[arg(long, value_name = "ADDR", help_heading = WITHOUT)]
    pub model_discovery_listen_addr: Option<String>,
    /// Routers of other regions
    #[arg(
        long,
        value_name = "URL",
        env = "STARGATE_REMOTE_WATCH_URLS",
        value_delimiter = ',',
        help_heading = WITHOUT
    )]
    pub remote_stargate_url: Vec<String>,
    /// Where pylons dial in over gRPC
    #[arg(long, value_name = "ADDR", help_heading = WITHOUT)]
    pub grpc_pylon_dial_addr: Option<String>,
    /// Names to advertise
    #[arg(long, value_name = "TEMPLATE", help_heading = WITHOUT)]
    pub advertised_hostname_template: Option<String>,
    /// For that template
    #[arg(long, value_name = "NAME", env = "POD_NAME", help_heading = WITHOUT)]
    pub pod_name: Option<String>,
    /// For that template
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", help_heading = WITHOUT)]
    pub pod_namespace: Option<String>,
    /// No discovery of other routers: there is none in this version, so this silences the warning that says so
    #[arg(long, help_heading = WITHOUT)]
    pub disable_dns_discovery: bool,
    /// Between two looks at that name [default: 1000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = WITHOUT)]
    pub dns_poll_ms: Option<i64>,
    /// How long its addresses are believed [default: 1000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = WITHOUT)]
    pub dns_resolver_ttl_ms: Option<i64>,
    /// Between two messages to those who watch routers [default: 5000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = WITHOUT)]
    pub watch_heartbeat_ms: Option<i64>,
    /// QUIC connections per server [default: 1]
    #[arg(long, value_name = "N", env = "STARGATE_DIRECT_QUIC_CONNECTIONS", help_heading = WITHOUT)]
    pub direct_quic_connections: Option<u32>,
    /// Certificate of QUIC connections
    #[arg(long, value_name = "FILE", env = "STARGATE_TLS_CERT_PATH", help_heading = WITHOUT)]
    pub tls_cert_path: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE", help_heading = WITHOUT)]
    pub tls_key_path: Option<PathBuf>,
    /// QUIC without looking at certificates
    #[arg(long, help_heading = WITHOUT)]
    pub quic_insecure: bool,
    /// Where spans go
    #[arg(long, value_name = "URL", help_heading = WITHOUT)]
    pub otel_endpoint: Option<String>,
    /// Name of this service in spans [default: stargate]
    #[arg(long, value_name = "NAME", help_heading = WITHOUT)]
    pub otel_service_name: Option<String>,
    /// direct (default) or reverse
    #[arg(long, value_name = "WORD", help_heading = WITHOUT)]
    pub backend_connectivity: Option<String>,
    /// Where pylons dial in over QUIC
    #[arg(long, value_name = "ADDR", help_heading = WITHOUT)]
    pub reverse_tunnel_listen_addr: Option<String>,
    /// The same, as pylons see it
    #[arg(long, value_name = "ADDR", help_heading = WITHOUT)]
    pub reverse_tunnel_pylon_dial_addr: Option<String>,
    /// How long a pylon's connection is waited for [default: 10000]
    #[arg(long, allow_negative_numbers = true, value_name = "MS", help_heading = WITHOUT)]
    pub reverse_tunnel_connect_timeout_ms: Option<i64>,
    /// raw-quic (default), http3 or webtransport
    #[arg(long, value_name = "NAME", help_heading = WITHOUT)]
    pub tunnel_protocol: Option<String>,
    /// Who vouches for registrations, over gRPC
    #[arg(long, value_name = "URL", help_heading = WITHOUT)]
    pub worker_auth_endpoint: Option<String>,
    /// Secrets for that
    #[arg(long, value_name = "FILE", env = "SECRETS_PATH", help_heading = WITHOUT)]
    pub secrets_path: Option<PathBuf>,
    /// Where in that file
    #[arg(long, value_name = "PATH", env = "SECRETS_JSON_PATH", help_heading = WITHOUT)]
    pub secrets_json_path: Option<String>,
}

/// What `/debug/state` shows of the configuration beside the listeners. `None`: null.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    pub grpc_listen_addr: Option<String>,
    pub model_discovery_listen_addr: Option<String>,
    pub advertise_addr: Option<String>,
    pub discovery_dns_name: Option<String>,
    pub tunnel_protocol: Option<String>,
    pub backend_connectivity: Option<String>,
    pub direct_quic_connections: Option<u32>,
}

impl StargateArgs {
    /// The settings to run with. The error is ready to print, one fault a line.
    pub fn settings(&self) -> Result<Settings, String> {
        let read = |path: &Path| std::fs::read_to_string(path).map_err(|error| error.to_string());
        let parsed = Settings::load(BASE, Path::new(""), &self.overrides(), read);
        parsed.map_err(|faults| listed("ringway stargate", &faults.to_string()))
    }

    pub fn shown(&self) -> Shown {
        let or =
            |given: &Option<String>, default: &str| Some(given.clone().unwrap_or_else(|| default.to_owned()));
        Shown {
            grpc_listen_addr: or(&self.listen_addr, "0.0.0.0:50071"),
            model_discovery_listen_addr: or(&self.model_discovery_listen_addr, "0.0.0.0:50073"),
            advertise_addr: Some(self.advertise_addr.clone()),
            discovery_dns_name: Some(self.stargate_discovery_dns_name.clone()),
            tunnel_protocol: or(&self.tunnel_protocol, "raw-quic"),
            backend_connectivity: or(&self.backend_connectivity, "direct"),
            direct_quic_connections: Some(self.direct_quic_connections.unwrap_or(1)),
        }
    }

    /// One sentence for each flag that was given and has no effect, or another one than it says.
    pub fn warnings(&self) -> Vec<String> {
        const GRPC: &str = "gRPC is not in this version: servers register over HTTP on the --admin listener, or are named by --backend";
        const QUIC: &str = "QUIC and its tunnels are not in this version: servers are reached over HTTP/1.1";
        const DISCOVERY: &str = "routers don't find each other in this version";
        const TLS: &str = "TLS is not in this version";
        const OTEL: &str = "spans are not exported in this version: their fields are those of the debug log line proxy_openai_request";
        const AUTH: &str = "registrations are not authenticated in this version: whoever reaches the --admin listener may register";
        // What every container of a cluster has in its environment was not said to this process.
        let said = |value: &Option<String>, variable: &str| {
            value.as_ref().is_some_and(|value| std::env::var(variable).as_ref() != Ok(value))
        };
        let given = [
            ("--listen-addr", self.listen_addr.is_some(), GRPC),
            ("--model-discovery-listen-addr", self.model_discovery_listen_addr.is_some(), GRPC),
            ("--remote-stargate-url", !self.remote_stargate_url.is_empty(), DISCOVERY),
            ("--grpc-pylon-dial-addr", self.grpc_pylon_dial_addr.is_some(), GRPC),
            ("--advertised-hostname-template", self.advertised_hostname_template.is_some(), DISCOVERY),
            ("--pod-name", said(&self.pod_name, "POD_NAME"), DISCOVERY),
            ("--pod-namespace", said(&self.pod_namespace, "POD_NAMESPACE"), DISCOVERY),
            ("--stargate-discovery-dns-name", !self.disable_dns_discovery, DISCOVERY),
            ("--dns-poll-ms", self.dns_poll_ms.is_some(), DISCOVERY),
            ("--dns-resolver-ttl-ms", self.dns_resolver_ttl_ms.is_some(), DISCOVERY),
            ("--watch-heartbeat-ms", self.watch_heartbeat_ms.is_some(), GRPC),
            ("--direct-quic-connections", self.direct_quic_connections.is_some(), QUIC),
            ("--tls-cert-path", self.tls_cert_path.is_some(), TLS),
            ("--tls-key-path", self.tls_key_path.is_some(), TLS),
            ("--quic-insecure", self.quic_insecure, QUIC),
            ("--otel-endpoint", self.otel_endpoint.is_some(), OTEL),
            ("--otel-service-name", self.otel_service_name.is_some(), OTEL),
            ("--backend-connectivity", self.backend_connectivity.is_some(), QUIC),
            ("--reverse-tunnel-listen-addr", self.reverse_tunnel_listen_addr.is_some(), QUIC),
            ("--reverse-tunnel-pylon-dial-addr", self.reverse_tunnel_pylon_dial_addr.is_some(), QUIC),
            ("--reverse-tunnel-connect-timeout-ms", self.reverse_tunnel_connect_timeout_ms.is_some(), QUIC),
            ("--tunnel-protocol", self.tunnel_protocol.is_some(), QUIC),
            ("--worker-auth-endpoint", self.worker_auth_endpoint.is_some(), AUTH),
            ("--secrets-path", self.secrets_path.is_some(), AUTH),
            ("--secrets-json-path", self.secrets_json_path.is_some(), AUTH),
        ];
        let mut warnings: Vec<String> = given
            .iter()
            .filter(|(_, given, _)| *given)
            .map(|(flag, _, why)| format!("{flag}: {why}"))
            .collect();
        for (flag, value) in [
            ("--registration-update-idle-timeout-ms", self.registration_update_idle_timeout_ms),
            ("--registration-update-max-idle-timeout-ms", self.registration_update_max_idle_timeout_ms),
        ] {
            if let Some(ms) = value.filter(|ms| ttl_ms(*ms) != Some(*ms) && *ms >= 0) {
                let taken = ttl_ms(ms).map_or("the default".to_owned(), |taken| taken.to_string());
                warnings.push(format!(
                    "{flag}: {ms}: registrations hold from {TTL_MS_MIN} to {TTL_MS_MAX} ms: {taken} is taken"
                ));
            }
        }
        warnings
    }

    fn overrides(&self) -> Vec<Override> {
        use Place::{Backends, EveryListener, EveryServer, Key};
        let word = |value: &Option<String>| value.as_deref().map(toml::Value::from);
        let number = |value: Option<i64>| value.map(toml::Value::from);
        let backends = (!self.backend.is_empty())
            .then(|| toml::Value::from(self.backend.iter().map(String::as_str).collect::<Vec<_>>()));
        // Without a ceiling of the configuration an engine's limit is what it reports itself.
        let unlimited = (!self.backend.is_empty()).then(|| toml::Value::from(0));
        let metrics = self.metrics_port.map(|port| toml::Value::from(format!("0.0.0.0:{port}")));
        let file = self.lb_config_path.as_ref().map(|file| toml::Value::from(file.display().to_string()));
        let longest = self.registration_update_max_idle_timeout_ms.and_then(ttl_ms);
        let usual = self.registration_update_idle_timeout_ms.and_then(ttl_ms);
        // The longest wins, as it does there.
        let usual = match (usual, longest) {
            (usual, Some(longest)) => Some(usual.unwrap_or(60_000).min(longest)),
            (usual, None) => usual,
        };
        let given: Vec<(&str, &str, Place, Option<toml::Value>)> = vec![
            ("--backend", "RINGWAY_BACKEND", Backends, backends),
            ("--backend", "RINGWAY_BACKEND", EveryServer("max_concurrency"), unlimited),
            ("--stargate-id", "", Key("stargate", "id"), Some(self.stargate_id.as_str().into())),
            ("--http-listen-addr", "", EveryListener("address"), word(&self.http_listen_addr)),
            ("--metrics-port", "", Key("stargate", "metrics_address"), metrics),
            ("--metrics-prefix", "", Key("stargate", "metrics_prefix"), word(&self.metrics_prefix)),
            ("--admin", "RINGWAY_ADMIN", Key("admin", "address"), word(&self.admin)),
            ("--health-path", "RINGWAY_HEALTH_PATH", Key("health", "path"), word(&self.health_path)),
            ("--lb-config-path", "", Key("stargate", "lb_config_path"), file),
            (
                "--deregistered-model-grace-ms",
                "",
                Key("stargate", "deregistered_model_grace_ms"),
                number(self.deregistered_model_grace_ms),
            ),
            (
                "--registration-update-idle-timeout-ms",
                "STARGATE_REGISTRATION_UPDATE_IDLE_TIMEOUT_MS",
                Key("stargate", "registration_ttl_ms"),
                number(usual),
            ),
            (
                "--registration-update-max-idle-timeout-ms",
                "STARGATE_REGISTRATION_UPDATE_MAX_IDLE_TIMEOUT_MS",
                Key("stargate", "registration_ttl_ms_max"),
                number(longest),
            ),
            (
                "--proxy-max-connect-retries",
                "STARGATE_PROXY_MAX_CONNECT_RETRIES",
                Key("stargate", "max_connect_retries"),
                number(self.proxy_max_connect_retries),
            ),
            (
                "--proxy-max-request-retries",
                "STARGATE_PROXY_MAX_REQUEST_RETRIES",
                Key("stargate", "max_request_retries"),
                number(self.proxy_max_request_retries),
            ),
            (
                "--proxy-max-replay-body-bytes",
                "STARGATE_PROXY_MAX_REPLAY_BODY_BYTES",
                Key("stargate", "replay_bytes_max"),
                number(self.proxy_max_replay_body_bytes),
            ),
            (
                "--proxy-require-pylon-retry-signal",
                "STARGATE_PROXY_REQUIRE_PYLON_RETRY_SIGNAL",
                Key("stargate", "require_retry_signal"),
                self.proxy_require_pylon_retry_signal.map(toml::Value::from),
            ),
            (
                "--proxy-retry-budget-header",
                "STARGATE_PROXY_RETRY_BUDGET_HEADER",
                Key("stargate", "retry_budget_header"),
                word(&self.proxy_retry_budget_header),
            ),
            (
                "--quic-connect-timeout-ms",
                "",
                Key("stargate", "connect_timeout_ms"),
                number(self.quic_connect_timeout_ms),
            ),
            (
                "--quic-request-timeout-ms",
                "",
                Key("stargate", "response_head_timeout_ms"),
                number(self.quic_request_timeout_ms),
            ),
            (
                "--shutdown-drain-timeout-ms",
                "",
                Key("limits", "drain_timeout_ms"),
                number(self.shutdown_drain_timeout_ms),
            ),
            ("--cores", "RINGWAY_CORES", Key("runtime", "cores"), word(&self.cores)),
            ("--driver", "RINGWAY_DRIVER", Key("runtime", "driver"), word(&self.driver)),
            ("--log-level", "RINGWAY_LOG_LEVEL", Key("log", "level"), word(&self.log_level)),
            ("--log-format", "RINGWAY_LOG_FORMAT", Key("log", "format"), word(&self.log_format)),
        ];
        given
            .into_iter()
            .filter_map(|(flag, variable, place, value)| {
                let flag = match variable {
                    "" => flag.to_owned(),
                    variable => format!("{flag} (or {variable})"),
                };
                value.map(|value| Override { flag, place, value })
            })
            .collect()
    }
}

/// What is taken for a time that registrations hold. `None`: the default, for 0, by which nothing would ever end. Negative
/// times stay, to be refused.
fn ttl_ms(ms: i64) -> Option<i64> {
    match ms {
        0 => None,
        ms if ms < 0 => Some(ms),
        ms => Some(ms.clamp(TTL_MS_MIN as i64, TTL_MS_MAX as i64)),
    }
}
