use super::*;

/// The index tells one server's node, and whoever else holds the block is known to; where a set of holders could not be kept
/// (`sets_max` is 0 here), every server has to look for itself.
#[test]
fn one_node_is_told_and_holders_are_known_or_nobody_is_sure() {
    let mut index = Index::new();
    index.configure(100, 0, 1000);
    let (a, b, c) = (3, 70, 71);
    assert_eq!(index.add(9, a, 11), Added::Told);
    assert_eq!((index.find(9, a), index.find(9, b), index.find(8, a)), (Some(11), None, None));
    // {3, 70} would have to be kept.
    assert_eq!(index.add(9, b, 22), Added::Apart);
    assert_eq!((index.find(9, a), index.find(9, b), index.find(8, c)), (Some(11), Some(NONE), Some(NONE)));
    assert!(!index.add_new(7, c, 33), "it might be there");
    index.remove(9, b, false);
    assert_eq!((index.find(9, a), index.find(9, b), index.find(8, c)), (Some(11), None, None));
    // With room for one, both are holders; the one that was told leaves, and the next that comes is told.
    index.configure(100, 1, 1000);
    assert_eq!(index.add(9, b, 22), Added::Apart);
    assert_eq!((index.find(9, b), index.find(9, c)), (Some(11), None));
    assert_eq!(index.add(9, b, 23), Added::Known);
    index.remove(9, a, true);
    assert_eq!((index.find(9, a), index.find(9, b)), (None, Some(NONE & NODE_MASK)));
    assert!(index.tell(9, 22, NONE) && !index.tell(9, 24, 23) && !index.tell(8, 1, NONE));
    assert_eq!(index.find(9, b), Some(22));
    index.remove(9, b, true);
    assert_eq!((index.find(9, b), index.overlooked), (None, 0));
}
