//! The KV cache of the simulated engine: a fixed pool of blocks, found again by their content.
//! Pure. A block is in use, or free; a free block keeps its content until it is the one unused
//! longest and somebody needs room. May not: know what a request is.

use std::collections::HashMap;

/// What a full block holds, and everything before it: equal hashes, equal text up to here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash(pub u64);

/// A place in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

const NOBODY: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Block {
    users: u32,
    content: Option<BlockHash>,
    /// Neighbours in the list of free blocks; meaningless while in use.
    older: u32,
    newer: u32,
}

/// All blocks of one engine, and the list of the free ones, longest unused first.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    oldest: u32,
    newest: u32,
    free: u32,
    known: HashMap<BlockHash, BlockId>,
    evictions: u64,
}

impl BlockPool {
    /// A pool of `total` blocks, all free and empty.
    pub fn new(total: u32) -> Self {
        let empty = Block { users: 0, content: None, older: NOBODY, newer: NOBODY };
        let mut pool = Self {
            blocks: vec![empty; total as usize],
            oldest: NOBODY,
            newest: NOBODY,
            free: 0,
            known: HashMap::new(),
            evictions: 0,
        };
        (0..total).for_each(|index| pool.append(index));
        pool
    }

    /// How many blocks there are.
    pub fn total(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX)
    }

    /// How many blocks nobody uses; some of them still hold content.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks whose content can be found, used or free.
    pub fn known(&self) -> usize {
        self.known.len()
    }

    /// Contents lost so far because somebody needed the room.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Share of blocks in use, `0.0..=1.0`.
    pub fn usage(&self) -> f64 {
        let total = self.total();
        if total == 0 { 0.0 } else { f64::from(total - self.free) / f64::from(total) }
    }

    /// The block that holds this content, if any does. Says nothing about use.
    pub fn find(&self, content: BlockHash) -> Option<BlockId> {
        self.known.get(&content).copied()
    }

    /// Whether nobody uses the block.
    pub fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id.0 as usize].users == 0
    }

    /// Takes `count` blocks, longest unused first, forgetting what they held. All or none.
    #[must_use]
    pub fn take(&mut self, count: u32, table: &mut Vec<BlockId>) -> bool {
        if self.free < count {
            return false;
        }
        for _ in 0..count {
            let id = BlockId(self.oldest);
            self.unlink(id.0);
            if self.forget(id) {
                self.evictions += 1;
            }
            self.blocks[id.0 as usize].users = 1;
            table.push(id);
        }
        true
    }

    /// One more user of a block that already holds the right content.
    pub fn share(&mut self, id: BlockId) {
        if self.is_free(id) {
            self.unlink(id.0);
        }
        self.blocks[id.0 as usize].users += 1;
    }

    /// Says what a block in use now holds. A second copy of known content stays unnamed.
    pub fn name(&mut self, id: BlockId, content: BlockHash) {
        let block = &mut self.blocks[id.0 as usize];
        if block.content.is_none() && !self.known.contains_key(&content) {
            block.content = Some(content);
            self.known.insert(content, id);
        }
    }

    /// Makes the block's content impossible to find; whether there was any.
    pub fn forget(&mut self, id: BlockId) -> bool {
        match self.blocks[id.0 as usize].content.take() {
            Some(content) => self.known.remove(&content).is_some(),
            None => false,
        }
    }

    /// One user fewer of each block of a sequence. The sequence's end becomes free first, so that
    /// its end is lost first and its beginning, which others may share, last.
    pub fn release(&mut self, table: &mut Vec<BlockId>) {
        while let Some(id) = table.pop() {
            let block = &mut self.blocks[id.0 as usize];
            debug_assert!(block.users > 0, "a block is given back once");
            block.users = block.users.saturating_sub(1);
            if block.users == 0 {
                self.append(id.0);
            }
        }
    }

    /// Forgets all content. `false`, and nothing happens, while any block is in use.
    pub fn forget_all(&mut self) -> bool {
        if self.free < self.total() {
            return false;
        }
        self.known.clear();
        self.blocks.iter_mut().for_each(|block| block.content = None);
        true
    }

    fn append(&mut self, index: u32) {
        let newest = self.newest;
        let block = &mut self.blocks[index as usize];
        block.older = newest;
        block.newer = NOBODY;
        match self.blocks.get_mut(newest as usize) {
            Some(before) => before.newer = index,
            None => self.oldest = index,
        }
        self.newest = index;
        self.free += 1;
    }

    fn unlink(&mut self, index: u32) {
        let Block { older, newer, .. } = self.blocks[index as usize];
        match self.blocks.get_mut(older as usize) {
            Some(before) => before.newer = newer,
            None => self.oldest = newer,
        }
        match self.blocks.get_mut(newer as usize) {
            Some(after) => after.older = older,
            None => self.newest = older,
        }
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_block_keeps_its_content_until_it_is_the_longest_unused() {
        let mut pool = BlockPool::new(3);
        let mut table = Vec::new();
        assert!(pool.take(2, &mut table));
        pool.name(table[0], BlockHash(1));
        pool.name(table[1], BlockHash(2));
        pool.release(&mut table);
        assert_eq!(pool.free(), 3);
        assert!(pool.find(BlockHash(1)).is_some() && pool.find(BlockHash(2)).is_some());
        assert!(pool.take(2, &mut table), "the never used one, then the end of the sequence");
        assert!(pool.find(BlockHash(1)).is_some(), "the beginning is lost last");
        assert!(pool.find(BlockHash(2)).is_none());
        assert_eq!(pool.evictions(), 1);
    }

    #[test]
    fn a_shared_block_is_free_only_when_its_last_user_is_gone() {
        let mut pool = BlockPool::new(2);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        assert!(pool.take(1, &mut first));
        pool.name(first[0], BlockHash(7));
        let found = pool.find(BlockHash(7)).unwrap();
        pool.share(found);
        second.push(found);
        pool.release(&mut first);
        assert_eq!(pool.free(), 1);
        assert!(!pool.forget_all(), "a cache in use is not reset");
        pool.release(&mut second);
        assert_eq!(pool.free(), 2);
        assert!(pool.forget_all());
        assert_eq!(pool.known(), 0);
    }

    #[test]
    fn taking_more_than_is_free_takes_nothing() {
        let mut pool = BlockPool::new(2);
        let mut table = Vec::new();
        assert!(!pool.take(3, &mut table));
        assert!(table.is_empty());
        assert_eq!(pool.free(), 2);
    }
}
