//! A few values by priority, in ascending order.
//!
//! *Invariant*: keys ascend, each once.
//! *Bound and cost*: every operation is linear in the priorities that are in use, which are few; space is kept for the most that
//! there were at once.

/// See the module's text.
#[derive(Clone, Debug, PartialEq)]
pub struct ByPriority<T>(Vec<(u32, T)>);

impl<T> Default for ByPriority<T> {
    fn default() -> Self {
        ByPriority(Vec::new())
    }
}

impl<T: Copy + Default> ByPriority<T> {
    /// `Ok`: where the key stands; `Err`: where it belongs.
    fn find(&self, priority: u32) -> Result<usize, usize> {
        match self.0.iter().position(|(key, _)| *key >= priority) {
            Some(at) if self.0[at].0 == priority => Ok(at),
            Some(at) => Err(at),
            None => Err(self.0.len()),
        }
    }

    pub fn of(&self, priority: u32) -> Option<T> {
        self.find(priority).ok().map(|at| self.0[at].1)
    }

    /// The value, which is the default one if there was none.
    pub fn entry(&mut self, priority: u32) -> &mut T {
        let at = self.find(priority).unwrap_or_else(|at| {
            self.0.insert(at, (priority, T::default()));
            at
        });
        &mut self.0[at].1
    }

    pub fn remove(&mut self, priority: u32) {
        if let Ok(at) = self.find(priority) {
            self.0.remove(at);
        }
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn retain(&mut self, mut keep: impl FnMut(u32, &T) -> bool) {
        self.0.retain(|(key, value)| keep(*key, value));
    }

    pub fn each(&mut self, change: impl FnMut(&mut T)) {
        self.0.iter_mut().map(|(_, value)| value).for_each(change);
    }

    /// In ascending order of priority.
    pub fn iter(&self) -> impl Iterator<Item = (u32, T)> + '_ {
        self.0.iter().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_ascend_whatever_the_order_they_come_in() {
        let mut map = ByPriority::default();
        for key in [5, 1, 9, 5, 0] {
            *map.entry(key) += 1_u32;
        }
        assert_eq!(map.iter().collect::<Vec<_>>(), [(0, 1), (1, 1), (5, 2), (9, 1)]);
        map.remove(5);
        map.remove(7);
        assert_eq!((map.of(5), map.of(9)), (None, Some(1)));
        map.retain(|key, _| key > 0);
        assert_eq!(map.iter().map(|(key, _)| key).collect::<Vec<_>>(), [1, 9]);
    }
}
