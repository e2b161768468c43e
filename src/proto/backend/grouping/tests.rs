use super::*;

/// A server of `pool` that serves `models`; `None`: it has not said yet.
fn server(name: &str, pool: Option<u16>, models: Option<&[&str]>) -> Server {
    Server {
        name: name.into(),
        url: "http://127.0.0.1:1".into(),
        address: None,
        host: "127.0.0.1:1".into(),
        base_path: "".into(),
        pool: pool.map(PoolId),
        weight: 1.0,
        weight_text: "1".into(),
        affinity_weight: 1.0,
        max_concurrency: 0,
        max_input_tokens: 0,
        tier: "".into(),
        kv_capacity_blocks: 1,
        api_key: None,
        models: models.map(|models| models.iter().map(|model| Box::from(*model)).collect()),
        registered: false,
        cluster_id: "server".into(),
        input_tps: 0.0,
        removed: false,
    }
}

fn catalog(servers: Vec<Server>) -> Catalog {
    let mut pool = built_in_pool("chat");
    pool.algorithm = Algorithm::LeastConnections;
    let pools = vec![pool, built_in_pool("embed")];
    let mut catalog = Catalog { version: 7, servers, pools, ..Catalog::default() };
    rebuild_groups(&mut catalog);
    catalog
}

/// A model that no server lists.
const UNLISTED: &str = "nobody-lists-this";

/// The group of a request with an input of so many tokens; an empty model stands for none.
fn group_of(catalog: &Catalog, model: &str, tier: &str, tokens: u64) -> Option<GroupId> {
    let model = (!model.is_empty()).then_some(model.as_bytes());
    catalog.route(model, tier.as_bytes())?.group(tokens)
}

fn of(catalog: &Catalog, model: &str, tier: &str, tokens: u64) -> Vec<u16> {
    let group = group_of(catalog, model, tier, tokens).map(|id| catalog.group(id));
    group.map(|group| group.candidates.iter().map(|id| id.0).collect()).unwrap_or_default()
}

fn of_model(catalog: &Catalog, model: &str) -> Vec<u16> {
    of(catalog, model, "", 0)
}

fn pool_name(catalog: &Catalog, model: &str) -> String {
    catalog.pool(catalog.route(Some(model.as_bytes()), b"").unwrap().pool).name.to_string()
}

#[test]
fn each_model_has_the_servers_that_list_it_and_those_that_serve_all() {
    let catalog = catalog(vec![
        server("any", Some(0), Some(&[])),
        server("ab", Some(0), Some(&["a", "b"])),
        server("b", Some(0), Some(&["b"])),
        server("new", Some(0), None),
    ]);
    assert_eq!(of_model(&catalog, "a"), [0, 1]);
    assert_eq!(of_model(&catalog, "b"), [0, 1, 2]);
    assert_eq!(of_model(&catalog, UNLISTED), [0]);
    assert_eq!(of_model(&catalog, ""), [0, 1, 2, 3]);
    assert!(catalog.learning);
    assert_eq!(catalog.models.len(), 2);
    assert_eq!(catalog.version, 7, "the version is the caller's");
}

#[test]
fn models_served_by_the_same_servers_share_a_group() {
    let catalog =
        catalog(vec![server("x", Some(0), Some(&["a", "b", "a"])), server("y", Some(0), Some(&["b", "a"]))]);
    assert_eq!(catalog.models[&b"a"[..]], catalog.models[&b"b"[..]]);
    assert_eq!(catalog.unnamed, catalog.models[&b"a"[..]]);
    assert_eq!((catalog.groups.len(), catalog.routes.len()), (1, 1));
    assert!(catalog.unlisted.is_empty() && !catalog.learning);
}

#[test]
fn the_pool_is_the_candidates_own_or_mixed_or_the_standalone_servers() {
    let catalog = catalog(vec![
        server("c1", Some(0), Some(&["one", "both", "with-spare"])),
        server("c2", Some(0), Some(&["one"])),
        server("e1", Some(1), Some(&["both", "embed-only"])),
        server("spare", None, Some(&["with-spare", "alone", "two-alone"])),
        server("spare2", None, Some(&["two-alone"])),
    ]);
    assert_eq!(pool_name(&catalog, "one"), "chat");
    assert_eq!(pool_name(&catalog, "embed-only"), "embed");
    assert_eq!(pool_name(&catalog, "both"), "mixed");
    assert_eq!(pool_name(&catalog, "with-spare"), "mixed");
    assert_eq!(pool_name(&catalog, "alone"), "spare");
    assert_eq!(pool_name(&catalog, "two-alone"), "mixed");
    let mixed = catalog.pools.iter().find(|pool| &*pool.name == MIXED).unwrap();
    assert_eq!(mixed.algorithm, Algorithm::WeightedRoundRobin);
    assert_eq!((mixed.queue_size, mixed.queue_timeout_ms), (QUEUE_SIZE, QUEUE_TIMEOUT_MS));
    assert_eq!(catalog.pools.iter().filter(|pool| &*pool.name == MIXED).count(), 1);
}

#[test]
fn ids_stay_while_models_come_and_go() {
    let mut catalog = catalog(vec![
        server("x", Some(0), Some(&["a"])),
        server("y", Some(0), None),
        server("z", Some(0), None),
    ]);
    let before = catalog.clone();
    rebuild_groups(&mut catalog);
    assert_eq!(catalog, before, "nothing learnt, nothing changed");

    let only_x = group_of(&catalog, "a", "", 0);
    catalog.servers[1].models = Some(vec!["a".into(), "b".into()]);
    rebuild_groups(&mut catalog);
    let both = group_of(&catalog, "a", "", 0);
    assert_ne!(both, only_x);
    assert_eq!(catalog.groups[..before.groups.len()], before.groups[..], "groups only grow");

    // y forgets "a": x alone again, under its old id.
    catalog.servers[1].models = Some(vec!["b".into()]);
    rebuild_groups(&mut catalog);
    assert_eq!(group_of(&catalog, "a", "", 0), only_x);
    assert_eq!(group_of(&catalog, "", "", 0), group_of(&before, "", "", 0));
    assert!(catalog.learning);
    catalog.servers[2].models = Some(Vec::new());
    rebuild_groups(&mut catalog);
    assert_eq!((of_model(&catalog, "a"), of_model(&catalog, "b")), (vec![0, 2], vec![1, 2]));
    assert!(!catalog.learning);
}

#[test]
fn removed_servers_are_in_no_group_that_is_in_use() {
    let mut catalog = catalog(vec![
        server("x", Some(0), Some(&["a", "gone"])),
        server("y", Some(0), Some(&["a"])),
        server("z", Some(0), None),
    ]);
    catalog.servers[0].removed = true;
    catalog.servers[2].removed = true;
    rebuild_groups(&mut catalog);
    assert_eq!(of_model(&catalog, "a"), [1]);
    assert_eq!(of_model(&catalog, ""), [1]);
    assert!(!catalog.models.contains_key(&b"gone"[..]));
    assert!(!catalog.learning, "a removed server has nothing more to say");
    catalog.servers[1].removed = true;
    rebuild_groups(&mut catalog);
    assert!(catalog.unnamed.is_empty() && catalog.unlisted.is_empty() && catalog.models.is_empty());
    assert!(catalog.routes.is_empty());
}

#[test]
fn a_server_in_another_pool_is_another_group() {
    let mut catalog = catalog(vec![server("x", Some(0), Some(&["a"]))]);
    let id = group_of(&catalog, "a", "", 0).unwrap();
    let before = catalog.group(id).clone();
    catalog.servers[0].pool = Some(PoolId(1));
    rebuild_groups(&mut catalog);
    assert_eq!(pool_name(&catalog, "a"), "embed");
    assert_ne!(group_of(&catalog, "a", "", 0), Some(id));
    assert_eq!(*catalog.group(id), before, "an id keeps its meaning for those who wait there");
    catalog.servers[0].pool = Some(PoolId(0));
    rebuild_groups(&mut catalog);
    assert_eq!(group_of(&catalog, "a", "", 0), Some(id));
}

fn in_tier(mut server: Server, tier: &str, max_input_tokens: u32) -> Server {
    server.tier = tier.into();
    server.max_input_tokens = max_input_tokens;
    server
}

/// Lifeboat rules: "Tiers never borrow from each other."
#[test]
fn tiers_share_no_server() {
    let catalog = catalog(vec![
        server("plain", Some(0), Some(&["a", "b"])),
        in_tier(server("gold", Some(0), Some(&["a"])), "gold", 0),
        in_tier(server("gold-any", Some(0), Some(&[])), "gold", 0),
        in_tier(server("silver", Some(1), Some(&["a"])), "silver", 0),
        in_tier(server("new", Some(1), None), "silver", 0),
    ]);
    assert_eq!(of(&catalog, "a", "", 0), [0]);
    assert_eq!(of(&catalog, "a", "gold", 0), [1, 2]);
    assert_eq!(of(&catalog, "b", "gold", 0), [2], "listed elsewhere, served by one that serves all");
    assert_eq!(of(&catalog, "a", "silver", 0), [3]);
    assert_eq!(group_of(&catalog, "b", "silver", 0), None);
    assert_eq!(group_of(&catalog, "a", "bronze", 0), None);
    assert_eq!(of(&catalog, UNLISTED, "gold", 0), [2]);
    assert_eq!(group_of(&catalog, UNLISTED, "", 0), None);
    assert_eq!(of(&catalog, "", "silver", 0), [3, 4]);
    assert!(catalog.knows(b"b") && catalog.knows(b"anything"), "one serves every model");
    assert!(catalog.has_tier(b"gold") && catalog.has_tier(b"") && !catalog.has_tier(b"bronze"));
    let label = |tier: &str| &*catalog.group(group_of(&catalog, "a", tier, 0).unwrap()).label;
    assert_eq!([label(""), label("gold"), label("silver")], ["chat", "chat/gold", "embed/silver"]);
}

/// Lifeboat rules: "`max_input_tokens` is 0 or ≥ the request's estimated input tokens".
#[test]
fn inputs_go_to_who_admits_them_and_keys_are_hashed_over_all() {
    let servers = |pool_of_long| {
        vec![
            in_tier(server("short", Some(0), Some(&["a"])), "", 1_000),
            in_tier(server("long", pool_of_long, Some(&["a"])), "", 8_000),
            in_tier(server("any", Some(0), Some(&["a"])), "", 0),
            in_tier(server("short2", Some(0), Some(&["a", "s"])), "", 1_000),
        ]
    };
    let one = catalog(servers(Some(0)));
    assert!(one.has_token_limits && !one.has_kv_pools);
    for (tokens, candidates) in [
        (0, &[0, 1, 2, 3][..]),
        (1_000, &[0, 1, 2, 3]),
        (1_001, &[1, 2]),
        (8_000, &[1, 2]),
        (8_001, &[2]),
        (u64::MAX, &[2]),
    ] {
        assert_eq!(of(&one, "a", "", tokens), candidates, "{tokens}");
        let group = one.group(group_of(&one, "a", "", tokens).unwrap());
        assert_eq!(group.members, [0, 1, 2, 3].map(BackendId), "{tokens}");
    }
    assert_eq!(of(&one, "s", "", 1_000), [3]);
    assert_eq!(group_of(&one, "s", "", 1_001), None, "longer than every server takes");
    // The pool is the whole set's, also for inputs that only one pool's servers take.
    let two = catalog(servers(Some(1)));
    let long = two.group(group_of(&two, "a", "", 8_001).unwrap());
    assert_eq!((&*long.label, &*two.pool(long.pool).name), (MIXED, MIXED));

    // A limit that changes nothing about who may take what keeps every group.
    let mut moved = one.clone();
    moved.servers[1].max_input_tokens = 9_000;
    rebuild_groups(&mut moved);
    assert_eq!(moved.groups, one.groups);
    assert_eq!(group_of(&moved, "a", "", 8_500), group_of(&one, "a", "", 8_000));
}

#[test]
fn prompts_are_worth_reading_where_some_route_is_kv_aware() {
    let mut catalog = catalog(vec![server("x", Some(0), Some(&["a"])), server("y", Some(1), Some(&["a"]))]);
    catalog.pools[0].algorithm = Algorithm::KvAware;
    rebuild_groups(&mut catalog);
    assert!(!catalog.has_kv_pools, "every route is mixed");
    catalog.servers[0].models = Some(vec!["a".into(), "b".into()]);
    rebuild_groups(&mut catalog);
    assert!(catalog.has_kv_pools);
    catalog.servers[0].removed = true;
    rebuild_groups(&mut catalog);
    assert!(!catalog.has_kv_pools);
}

#[test]
fn the_same_servers_give_the_same_ids() {
    let servers = || {
        (0..40_u16)
            .map(|i| {
                let models: Vec<String> =
                    (0..30).filter(|m| (i + m) % 7 < 3).map(|m| format!("m{m}")).collect();
                let names: Vec<&str> = models.iter().map(String::as_str).collect();
                server(&format!("s{i}"), (i % 3 != 0).then_some(i % 2), Some(&names))
            })
            .collect::<Vec<_>>()
    };
    let first = catalog(servers());
    for _ in 0..5 {
        assert_eq!(catalog(servers()), first);
    }
    for group in &first.groups {
        assert!(!group.candidates.is_empty() && group.candidates.is_sorted());
    }
}

#[test]
fn a_large_fleet_is_grouped_quickly_enough_to_do_it_often() {
    let servers = (0..2_000_u16).map(|i| {
        let names: Vec<String> = (0..20).map(|m| format!("m{}", (u32::from(i) * 13 + m) % 400)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        server(&format!("s{i}"), Some(0), Some(&names))
    });
    let mut catalog = catalog(servers.collect());
    assert_eq!(catalog.models.len(), 400);
    let groups = catalog.groups.len();
    for _ in 0..10 {
        rebuild_groups(&mut catalog);
    }
    assert_eq!(catalog.groups.len(), groups);
}
