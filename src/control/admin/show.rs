//! Figures as the JSON of the admin API.
//!
//! *Source*: the configuration reference, admin API.

use serde_json::{Value, json};

use crate::control::figures::{Figures, KvRow, ServerRow};
use crate::control::state::ShardState;
use crate::proto::account::drift::Cause;
use crate::proto::message::Phase;

/// One server, as it stands in `/admin/v1/state` and in the answer to a change.
pub(super) fn server_json(row: &ServerRow) -> Value {
    let drift = &row.drift;
    json!({
        "name": row.name, "url": row.url, "state": row.state, "weight": row.weight, "in_flight": row.in_flight,
        "max_concurrency": row.max_concurrency, "max_input_tokens": row.max_input_tokens,
        "routing_tier": row.tier, "dispatched": row.dispatched, "share": drift.share,
        "weight_share": drift.weight_share, "drift": drift.drift, "drift_badge": drift.badge,
        "drift_cause": drift.cause.map(Cause::name), "models": row.models, "kv": kv_json(&row.kv),
    })
}

/// Null where prefixes are neither remembered nor reported.
fn kv_json(kv: &KvRow) -> Value {
    let mut value = json!({
        "prefix_matched": kv.prefix_matched, "prefix_total": kv.prefix_total,
        "reported_prompt_tokens": kv.reported_prompt_tokens,
        "reported_cached_tokens": kv.reported_cached_tokens,
        "predicted_cached_tokens": kv.predicted_cached_tokens,
    });
    if let Some(source) = kv.source {
        let clients: Vec<Value> = kv
            .clients
            .iter()
            .map(|(client, blocks)| json!({"client": format!("{:016x}", client.0), "blocks": blocks}))
            .collect();
        let of_memory = json!({
            "capacity_blocks": kv.capacity_blocks, "capacity_source": source,
            "memory_blocks": kv.memory.held, "memory_capacity_blocks": kv.memory.capacity,
            "memory_evicted_blocks": kv.memory.evicted, "active_clients": kv.memory.clients,
            "clients": clients,
        });
        if let (Value::Object(all), Value::Object(more)) = (&mut value, of_memory) {
            all.extend(more);
        }
    } else if kv.prefix_total == 0 && kv.reported_prompt_tokens == 0 {
        return Value::Null;
    }
    value
}

/// How far the process is, in one word.
const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Serving => "serving",
        Phase::Settling => "settling",
        Phase::Draining => "draining",
        Phase::Stopping => "stopping",
    }
}

/// The body of `/admin/v1/state`. A standalone server stands in its built-in pool, which bears its name.
pub(super) fn state_json(
    figures: &Figures,
    shards: &[ShardState],
    phase: Phase,
    registrations: Value,
    uptime_s: f64,
) -> Value {
    let pools: Vec<Value> = figures
        .pools
        .iter()
        .enumerate()
        .map(|(index, pool)| {
            let of_pool = |row: &&ServerRow| match row.pool_index {
                Some(of) => of == index,
                None => row.name == pool.name && !row.registered,
            };
            let servers: Vec<Value> = figures.servers.iter().filter(of_pool).map(server_json).collect();
            json!({
                "name": pool.name, "algorithm": pool.algorithm, "routing_mode": pool.routing_mode,
                "queued": pool.queued, "servers": servers,
            })
        })
        .collect();
    let shards: Vec<Value> = shards
        .iter()
        .enumerate()
        .map(|(number, shard)| {
            let driver = match shard {
                ShardState::Running { io_uring: true } => "io_uring".into(),
                ShardState::Running { io_uring: false } => "epoll".into(),
                ShardState::Starting | ShardState::Failed => Value::Null,
            };
            let state = match (shard, phase) {
                (ShardState::Starting, _) => "starting",
                (ShardState::Running { .. }, Phase::Serving) => "running",
                (ShardState::Running { .. }, phase) => phase_name(phase),
                (ShardState::Failed, _) => "failed",
            };
            let row = figures.shards.iter().find(|row| row.shard == number);
            json!({
                "shard": number, "state": state, "driver": driver,
                "connections": row.map(|row| row.connections), "accepted": row.map(|row| row.accepted),
                "active": row.map(|row| row.active), "finished": row.map(|row| row.finished),
                "touches_sent": row.map(|row| row.touches_sent),
                "touches_dropped": row.map(|row| row.touches_dropped),
                "touch_bytes": row.map(|row| row.touch_bytes),
            })
        })
        .collect();
    json!({
        "phase": phase_name(phase), "pools": pools, "registrations": registrations, "shards": shards,
        "uptime_s": (uptime_s * 1e3).round() / 1e3, "version": env!("CARGO_PKG_VERSION"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::figures::tests::sample;
    use crate::proto::account::drift::Drift;
    use crate::proto::ids::ClientId;

    #[test]
    fn the_state_has_the_fields_of_the_reference() {
        let shards = [ShardState::Running { io_uring: true }, ShardState::Starting];
        let mut figures = sample();
        let mut own = figures.pools[0].clone();
        own.name = "spare".into();
        own.queued = 0;
        figures.pools.push(own);
        figures.servers[0].drift = Drift {
            share: Some(0.75),
            weight_share: Some(0.5),
            drift: Some(0.5),
            judged: true,
            badge: true,
            cause: Some(Cause::AtCapacity),
        };
        let state = state_json(&figures, &shards, Phase::Serving, json!([]), 12.345_678);
        assert_eq!(state["pools"][0]["name"], "chat");
        assert_eq!(state["pools"][0]["queued"], 6);
        let server = &state["pools"][0]["servers"][0];
        for field in [
            "name",
            "url",
            "state",
            "weight",
            "in_flight",
            "max_concurrency",
            "dispatched",
            "share",
            "weight_share",
            "drift",
            "drift_cause",
            "models",
        ] {
            assert!(server.get(field).is_some(), "no {field} in {server}");
        }
        assert_eq!(
            (&server["in_flight"], &server["share"], &server["drift"]),
            (&json!(4), &json!(0.75), &json!(0.5))
        );
        assert_eq!((&server["drift_badge"], &server["drift_cause"]), (&json!(true), &json!("at_capacity")));
        assert_eq!(state["pools"][0]["servers"].as_array().unwrap().len(), 2);
        assert_eq!(state["pools"][1]["servers"][0]["name"], "spare");
        assert_eq!(state["pools"][1]["servers"][0]["drift_cause"], Value::Null);
        assert_eq!(state["shards"][0]["driver"], "io_uring");
        assert_eq!(
            (&state["shards"][0]["state"], &state["shards"][1]["state"]),
            (&json!("running"), &json!("starting"))
        );
        assert_eq!(state["uptime_s"], 12.346);
        assert_eq!(state["version"], env!("CARGO_PKG_VERSION"));
        let ending = state_json(&figures, &shards, Phase::Draining, json!([]), 1.0);
        assert_eq!(
            (&ending["phase"], &ending["shards"][0]["state"]),
            (&json!("draining"), &json!("draining"))
        );
    }

    #[test]
    fn prefix_figures_show_where_there_are_any() {
        let mut figures = sample();
        assert_eq!(server_json(&figures.servers[0])["kv"], Value::Null);
        let kv = &mut figures.servers[0].kv;
        kv.reported_prompt_tokens = 100;
        kv.reported_cached_tokens = 40;
        let reported = server_json(&figures.servers[0]);
        assert_eq!(reported["kv"]["reported_cached_tokens"], 40, "engines report to any algorithm");
        assert!(reported["kv"].get("memory_blocks").is_none());
        let kv = &mut figures.servers[0].kv;
        kv.source = Some("engine");
        kv.capacity_blocks = 77;
        kv.memory.held = 9;
        kv.clients = vec![(ClientId(0xab), 5), (ClientId(u64::MAX), 4)];
        let kv = &server_json(&figures.servers[0])["kv"];
        assert_eq!((&kv["capacity_blocks"], &kv["capacity_source"]), (&json!(77), &json!("engine")));
        assert_eq!(kv["memory_blocks"], 9);
        assert_eq!(kv["clients"][0], json!({"client": "00000000000000ab", "blocks": 5}));
    }
}
