//! Every bound of the process, with its unit in the name and its reason beside it.

/// Headers in one head; more is 431.
pub const HEADERS_MAX: usize = 128;
/// Length of a request target; more is 414.
pub const TARGET_BYTES_MAX: usize = 16 * 1024;
/// One chunk-size line with its extensions (RFC 9112 section 7.1.1 lets a recipient limit it).
pub const CHUNK_LINE_BYTES_MAX: usize = 4 * 1024;
/// All trailer lines of one body.
pub const TRAILER_BYTES_MAX: usize = 16 * 1024;
/// Shards of a process: `ShardId` is a byte.
pub const SHARDS_MAX: usize = 256;
/// Servers of a process: `BackendId` is 16 bits and one value is kept free.
pub const BACKENDS_MAX: usize = 65_535;
/// Groups of servers up to which live changes may make new ones: ids are never reused, and each shard keeps every group.
pub const GROUPS_MAX: usize = 16 * 1024;
/// Slots of one shard-to-shard ring. Full: permit messages wait at the sender, load deltas are dropped (they are absolute).
pub const MESH_RING_SLOTS: usize = 1024;
/// Slots of each ring between the control thread and a shard.
pub const CONTROL_RING_SLOTS: usize = 1024;
/// Leading prefix blocks of one prompt that are remembered and told to peers; with 256-byte blocks a whole MiB.
pub const TOUCH_BLOCKS_MAX: usize = 4096;
/// Rings for touches of all pairs of shards together, as far as each may be as small as the least below.
pub const TOUCH_RINGS_BYTES: usize = 64 << 20;
/// Words of one shard's ring of touches to another: at least one touch of the largest size and some, at most half a MiB.
pub const TOUCH_RING_WORDS_MIN: usize = 8 * 1024;
pub const TOUCH_RING_WORDS_MAX: usize = 64 * 1024;
/// Touches are applied once they are so old that every shard has the older ones: longer than a turn of a busy shard's loop, within
/// which its clock stands still, and than a ring's delay.
pub const TOUCH_SETTLE_MS: u64 = 10;
/// A shard turns its timers, deltas and deadlines at least this often while it has work.
pub const SHARD_TICK_MS: u64 = 5;
/// How old another shard's load figures may be, ring delay aside.
pub const LOAD_DELTA_STALE_MS_MAX: u64 = 2 * SHARD_TICK_MS;
/// A free permit lease that was not used for this long goes back to its home shard.
pub const LEASE_IDLE_MS: u64 = 100;
/// A longer affinity key is hashed at every use instead of remembered.
pub const AFFINITY_KEY_BYTES_MAX: usize = 256;
/// Affinity keys whose ranking of clusters one load balancer remembers: what is asked for within minutes.
pub const AFFINITY_KEYS_MAX: usize = 4096;
/// Keys times clusters that one load balancer remembers, 12 bytes each: 6 MiB.
pub const AFFINITY_DRAWS_MAX: usize = 512 * 1024;
/// Servers one request may be sent to, the first included.
pub const ATTEMPTS_MAX: usize = 3;
/// Ring nodes of one cluster in `lb-config.json`: with a thousand clusters such a ring has 128 MiB.
pub const VIRTUAL_NODES_MAX: u64 = 8192;
/// Ring nodes of one cluster in a routing expression, whose author is not the operator.
pub const EXPRESSION_VIRTUAL_NODES_MAX: u64 = 1024;
/// Longest routing expression, and its parameters.
pub const EXPRESSION_BYTES_MAX: usize = 1024;
pub const EXPRESSION_PARAMETERS_MAX: usize = 32;
/// Routing keys and models for which a shard keeps what their expressions came to: the last two of each. Beyond, the longest idle goes.
pub const EXPRESSIONS_MAX: usize = 16 * 1024;
/// Such an entry goes when no request came for it for so long.
pub const EXPRESSION_IDLE_MS: u64 = 15 * 60 * 1000;
/// Registrations that may be live at once; more are refused with 503.
pub const REGISTRATIONS_MAX: usize = 4096;
/// Models of one registration.
pub const REGISTRATION_MODELS_MAX: usize = 256;
/// Priorities for which one registration may report times in its queue, per model.
pub const REGISTRATION_PRIORITIES_MAX: usize = 256;
/// Body of one registration: all its models with every field.
pub const REGISTRATION_BYTES_MAX: usize = 512 << 10;
/// Slots of the Stargate family: pairs of a server and a model that ever were; a shard keeps about half a KiB for each.
pub const SLOTS_MAX: usize = 64 * 1024;

const _: () = assert!(BACKENDS_MAX <= u16::MAX as usize);
const _: () = assert!(SHARDS_MAX <= u8::MAX as usize + 1);
const _: () = assert!(TOUCH_BLOCKS_MAX * 2 <= TOUCH_RING_WORDS_MIN);
const _: () = assert!(CHUNK_LINE_BYTES_MAX < TRAILER_BYTES_MAX);
