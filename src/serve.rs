//! `ringway serve` and `ringway stargate`: binds, starts the shards, and becomes the control thread.
//!
//! *Errors*: whatever keeps the router from starting ends it with exit code 2, what it was and what to do about it; `ringway stargate`
//! ends with 1 whatever went wrong.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::cli::{Shown, StargateArgs, exit};
use crate::clock::Clock;
use crate::control::signals::Signals;
use crate::control::{self, Doors, Options};
use crate::limits::SHARDS_MAX;
use crate::mesh;
use crate::proto::classify::caller::CallerRules;
use crate::proto::config::lb_config::LbConfig;
use crate::proto::config::{self, Cores, HalfClose, Settings};
use crate::proto::dispatcher::DispatcherOptions;
use crate::proto::http1::HeadLimits;
use crate::proto::ids::ShardId;
use crate::proto::stargate::target_router::TargetRouterOptions;
use crate::runtime::Driver;
use crate::shard::stargate::desk::{Levels, StargateOptions};
use crate::shard::state::SessionLimits;
use crate::shard::{self, ShardOptions, listener};

/// How long a forced stop waits for the shards to tell the clients.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Stack of a shard's thread: its futures live on the heap.
const STACK_BYTES: usize = 2 << 20;

/// Runs the router until it is told to stop; returns the exit code.
pub fn serve(settings: &Settings) -> u8 {
    crate::log::init(&settings.log);
    run(settings, &Shown::default())
}

/// The same as Stargate does it; returns its exit code.
pub fn stargate(settings: &Settings, args: &StargateArgs) -> u8 {
    crate::log::init(&settings.log);
    tracing::info!(
        stargate_id = %args.stargate_id,
        http_listen_addr = %settings.listeners[0].address,
        advertise_addr = %args.advertise_addr,
        version = env!("CARGO_PKG_VERSION"),
        "starting stargate"
    );
    for warning in args.warnings() {
        tracing::warn!("{warning}");
    }
    match run(settings, &args.shown()) {
        exit::DONE => exit::DONE,
        _ => exit::WRONG,
    }
}

fn run(settings: &Settings, shown: &Shown) -> u8 {
    match start(settings, shown) {
        Ok(code) => code,
        Err(text) => {
            eprintln!("ringway: cannot start: {text}");
            exit::NOT_STARTED
        }
    }
}

fn start(settings: &Settings, shown: &Shown) -> Result<u8, String> {
    for warning in settings.warnings() {
        tracing::warn!("{warning}");
    }
    if let Some(lb_config) = &settings.lb_config {
        tracing::info!(
            default_lb = %lb_config.default_name(),
            model_overrides = lb_config.model_overrides(),
            "load balancer config loaded"
        );
    }
    raise_descriptor_limit(settings.limits.connections_max);
    let cores = cores(&settings.runtime.cores)?;
    let signals = Signals::register().map_err(|e| format!("signal handlers: {e}"))?;
    let clock = Clock::new();
    let (ports, control_port) = mesh::build(cores.len()).map_err(|e| {
        format!("wake-up descriptors for {} shards: {e}; raise the descriptor limit (ulimit -n)", cores.len())
    })?;
    let mut lines = Vec::new();
    let mut trusted_address = None;
    let mut per_shard: Vec<Vec<(TcpListener, config::Profile)>> = cores.iter().map(|_| Vec::new()).collect();
    for one in &settings.listeners {
        let mut address = one.address;
        listener::probe(address).map_err(|e| cannot_listen(address, &e))?;
        for listeners in &mut per_shard {
            let bound = listener::bind(address).map_err(|e| cannot_listen(address, &e))?;
            // Port 0: the first shard's listener says which port the others share.
            address = bound.local_addr().map_err(|e| cannot_listen(address, &e))?;
            listeners.push((bound, one.profile));
        }
        lines.push(format!("listening http {address} profile={}", one.profile.name()));
        if one.profile == config::Profile::Stargate {
            trusted_address.get_or_insert(address);
        }
    }
    let (admin, address) = open(settings.admin.address)?;
    lines.push(format!("listening admin {address}"));
    let metrics = settings
        .stargate
        .metrics_address
        .filter(|_| settings.has_trusted_listener())
        .map(open)
        .transpose()?;
    let metrics_address = metrics.as_ref().map(|(_, address)| *address);
    if let Some(address) = metrics_address {
        lines.push(format!("listening metrics {address}"));
        tracing::info!(%address, "metrics server listening");
    }
    let doors = Doors { admin, metrics: metrics.map(|(listener, _)| listener) };
    let debug_config = debug_config(settings, shown, trusted_address, metrics_address);

    let catalog = settings.catalog();
    let limits = session_limits(settings, cores.len());
    let kv_memory_bytes_max = usize::try_from(settings.limits.kv_memory_bytes_max).unwrap_or(usize::MAX);
    let health = &settings.health;
    for (index, ((core, port), listeners)) in cores.iter().zip(ports).zip(per_shard).enumerate() {
        let options = ShardOptions {
            id: ShardId(index as u8),
            shards: cores.len(),
            core: Some(*core),
            driver: match settings.runtime.driver {
                config::Driver::Auto => Driver::Auto,
                config::Driver::IoUring => Driver::IoUring,
                config::Driver::Epoll => Driver::Epoll,
            },
            spin_us: settings.runtime.spin_us,
            limits: limits.clone(),
            header_prefix: settings.headers.prefix.as_str().into(),
            dispatcher: DispatcherOptions {
                bench_after: health.bench_after,
                bench_ms: health.bench_ms,
                bench_max_ms: health.bench_max_ms,
                kv_memory_bytes_max: kv_memory_bytes_max / cores.len(),
                seed: random(),
                ..DispatcherOptions::default()
            },
            catalog: catalog.clone(),
            port,
            listeners,
            clock,
            stargate: trusted(settings, ShardId(index as u8), cores.len(), &debug_config),
        };
        thread::Builder::new()
            .name(format!("shard-{index}"))
            .stack_size(STACK_BYTES)
            .spawn(move || shard::run(options))
            .map_err(|e| format!("thread of shard {index}: {e}"))?;
    }
    let ready = move || {
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        // A closed stdout concerns whoever closed it.
        let _ = writeln!(out, "{}\nready", lines.join("\n")).and_then(|()| out.flush());
    };
    let code = control::run(Options::new(settings), clock, control_port, catalog, doors, signals, ready)
        .map_err(|e| format!("control thread: {e}"))?;
    if code == exit::DONE {
        tracing::info!("graceful shutdown complete");
    }
    if code == exit::FORCED {
        // The shards have just been told to stop; what they cut shall still hear why.
        #[expect(clippy::disallowed_methods, reason = "this thread has nothing left to do")]
        thread::sleep(LAST_WORDS);
    }
    Ok(code)
}

/// A listener of the control thread, and where it listens.
fn open(address: SocketAddr) -> Result<(TcpListener, SocketAddr), String> {
    let listener = TcpListener::bind(address).map_err(|e| cannot_listen(address, &e))?;
    let bound = listener.local_addr().map_err(|e| cannot_listen(address, &e))?;
    Ok((listener, bound))
}

/// The `config` of `/debug/state`, as JSON.
fn debug_config(
    settings: &Settings,
    shown: &Shown,
    http: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
) -> Box<str> {
    let text = |address: Option<SocketAddr>| address.map(|address| address.to_string());
    let config = serde_json::json!({
        "stargate_id": settings.stargate.id,
        "grpc_listen_addr": shown.grpc_listen_addr,
        "model_discovery_listen_addr": shown.model_discovery_listen_addr,
        "http_listen_addr": text(http),
        "metrics_listen_addr": text(metrics),
        "advertise_addr": shown.advertise_addr,
        "stargate_discovery_dns_name": shown.discovery_dns_name,
        "tunnel_protocol": shown.tunnel_protocol,
        "backend_connectivity": shown.backend_connectivity,
        "direct_quic_connections": shown.direct_quic_connections,
    });
    config.to_string().into()
}

fn cannot_listen(address: SocketAddr, error: &std::io::Error) -> String {
    let advice = match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "; another process listens there: stop it, or choose another port (port 0 takes a free one)"
        }
        std::io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need CAP_NET_BIND_SERVICE, or choose a higher one"
        }
        std::io::ErrorKind::AddrNotAvailable => "; no interface of this host has that address",
        _ => "",
    };
    format!("listen on {address}: {error}{advice}")
}

fn cores(cores: &Cores) -> Result<Vec<usize>, String> {
    match cores {
        Cores::List(list) => {
            let allowed = core_affinity::get_core_ids().unwrap_or_default();
            match list.iter().find(|core| !allowed.iter().any(|one| one.id == **core)) {
                Some(core) => {
                    let allowed: Vec<_> = allowed.iter().map(|one| one.id.to_string()).collect();
                    Err(format!(
                        "core {core} (runtime.cores, --cores) is not one that this process may run on; those are {}",
                        allowed.join(", ")
                    ))
                }
                None => Ok(list.clone()),
            }
        }
        Cores::Allowed => {
            let allowed = core_affinity::get_core_ids().unwrap_or_default();
            if allowed.is_empty() {
                return Err("the process's affinity mask cannot be read; name the cores with --cores".into());
            }
            Ok(allowed.into_iter().map(|core| core.id).take(SHARDS_MAX).collect())
        }
    }
}

/// 64 bits that nobody can tell: the standard library seeds its hashers from the system's randomness.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn session_limits(settings: &Settings, shards: usize) -> SessionLimits {
    let limits = &settings.limits;
    let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    SessionLimits {
        head: HeadLimits::new(
            u32::try_from(limits.head_bytes_max).unwrap_or(u32::MAX),
            settings.headers.prefix.as_bytes(),
        ),
        caller: CallerRules::new(
            &settings.headers.prefix,
            settings.digest_secret.as_ref().map(|secret| secret.0.as_bytes()),
        ),
        prompt_seed: random(),
        affinity_seed: (u128::from(random()) << 64 | u128::from(random())).to_be_bytes(),
        body_bytes_max: limits.body_bytes_max,
        classify_bytes_max: bytes(limits.classify_bytes_max.min(limits.replay_bytes_max)),
        buffered_bytes_max: bytes(limits.buffered_bytes_max) / shards,
        connections_max: u32::try_from(limits.connections_max).unwrap_or(u32::MAX),
        client_head_timeout_ms: limits.client_head_timeout_ms,
        client_body_idle_timeout_ms: limits.client_body_idle_timeout_ms,
        half_close_allowed: limits.half_close == HalfClose::Allow,
        connect_timeout_ms: limits.connect_timeout_ms,
        response_head_timeout_ms: limits.response_head_timeout_ms,
        between_bytes_timeout_ms: limits.between_bytes_timeout_ms,
        total_timeout_ms: limits.total_timeout_ms,
        keepalive_timeout_ms: limits.keepalive_timeout_ms,
    }
}

/// What trusted listeners are started with; `None`: there is none.
fn trusted(settings: &Settings, me: ShardId, shards: usize, debug_config: &str) -> Option<StargateOptions> {
    if !settings.has_trusted_listener() {
        return None;
    }
    let (limits, stargate) = (&settings.limits, &settings.stargate);
    let head_bytes_max = u32::try_from(limits.head_bytes_max).unwrap_or(u32::MAX);
    Some(StargateOptions {
        head: HeadLimits { nominations_void: true, ..HeadLimits::new(head_bytes_max, b"") },
        router: TargetRouterOptions {
            me,
            shards,
            max_connect_retries: stargate.max_connect_retries,
            max_request_retries: stargate.max_request_retries,
            grace_ms: stargate.deregistered_model_grace_ms,
            seed: random(),
        },
        lb_config: settings.lb_config.clone().unwrap_or_else(|| Arc::new(LbConfig::permissive())),
        replay_bytes_max: stargate.replay_bytes_max,
        connect_timeout_ms: stargate.connect_timeout_ms,
        head_timeout_ms: stargate.response_head_timeout_ms,
        requires_retry_signal: stargate.require_retry_signal,
        retry_budget_header: stargate.retry_budget_header.as_bytes().into(),
        debug_config: debug_config.into(),
        levels: Levels {
            warn: tracing::enabled!(tracing::Level::WARN),
            info: tracing::enabled!(tracing::Level::INFO),
            debug: tracing::enabled!(tracing::Level::DEBUG),
        },
    })
}

/// Asks for as many descriptors as the connections may need: one for the client, one for the server.
fn raise_descriptor_limit(connections_max: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid, writable `struct rlimit`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return;
    }
    let want = connections_max.saturating_mul(2).saturating_add(1024);
    if limit.rlim_cur < want {
        limit.rlim_cur = want.min(limit.rlim_max);
        // SAFETY: as above; failing leaves the limit as it was.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    }
    if limit.rlim_cur < want {
        tracing::warn!(
            "descriptor limit is {}; limits.connections_max = {connections_max} may need {want} (ulimit -n, LimitNOFILE=)",
            limit.rlim_cur
        );
    }
}
