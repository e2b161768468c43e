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
        max_concurrency: 0,
        api_key: None,
        models: models.map(|models| models.iter().map(|model| Box::from(*model)).collect()),
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

fn candidates(catalog: &Catalog, id: Option<GroupId>) -> Vec<u16> {
    id.map(|id| catalog.group(id).candidates.iter().map(|id| id.0).collect()).unwrap_or_default()
}

fn of_model(catalog: &Catalog, model: &str) -> Vec<u16> {
    candidates(catalog, catalog.models.get(model.as_bytes()).copied())
}

fn pool_name(catalog: &Catalog, model: &str) -> String {
    catalog.pool(catalog.group(catalog.models[model.as_bytes()]).pool).name.to_string()
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
    assert_eq!(candidates(&catalog, catalog.unlisted), [0]);
    assert_eq!(candidates(&catalog, catalog.unnamed), [0, 1, 2, 3]);
    assert!(catalog.learning);
    assert_eq!(catalog.models.len(), 2);
    assert_eq!(catalog.version, 7, "the version is the caller's");
}

#[test]
fn models_served_by_the_same_servers_share_a_group() {
    let catalog =
        catalog(vec![server("x", Some(0), Some(&["a", "b", "a"])), server("y", Some(0), Some(&["b", "a"]))]);
    assert_eq!(catalog.models[&b"a"[..]], catalog.models[&b"b"[..]]);
    assert_eq!(catalog.unnamed, Some(catalog.models[&b"a"[..]]));
    assert_eq!((catalog.groups.len(), catalog.unlisted, catalog.learning), (1, None, false));
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

    let only_x = catalog.models[&b"a"[..]];
    catalog.servers[1].models = Some(vec!["a".into(), "b".into()]);
    rebuild_groups(&mut catalog);
    let both = catalog.models[&b"a"[..]];
    assert_ne!(both, only_x);
    assert_eq!(catalog.groups[..before.groups.len()], before.groups[..], "groups only grow");

    // y forgets "a": x alone again, under its old id.
    catalog.servers[1].models = Some(vec!["b".into()]);
    rebuild_groups(&mut catalog);
    assert_eq!(catalog.models[&b"a"[..]], only_x);
    assert_eq!(catalog.unnamed, before.unnamed);
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
    assert_eq!(candidates(&catalog, catalog.unnamed), [1]);
    assert!(!catalog.models.contains_key(&b"gone"[..]));
    assert!(!catalog.learning, "a removed server has nothing more to say");
    catalog.servers[1].removed = true;
    rebuild_groups(&mut catalog);
    assert_eq!((catalog.unnamed, catalog.unlisted, catalog.models.len()), (None, None, 0));
}

#[test]
fn a_group_follows_its_server_into_another_pool() {
    let mut catalog = catalog(vec![server("x", Some(0), Some(&["a"]))]);
    let id = catalog.models[&b"a"[..]];
    catalog.servers[0].pool = Some(PoolId(1));
    rebuild_groups(&mut catalog);
    assert_eq!(catalog.models[&b"a"[..]], id);
    assert_eq!(pool_name(&catalog, "a"), "embed");
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
