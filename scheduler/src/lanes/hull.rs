//! The line that is highest at some x, of lines that come and go: the dynamic convex hull of Orloj's queue
//! (section 4.4), in the dual.
//!
//! A request's score is `alpha x + beta` with x = e^{bt}: a line over x, or the point (alpha, beta) of the paper. The
//! request with the highest score is the line on the upper envelope at x, which is the hull's vertex where a line of
//! slope -x touches it. The structure is Overmars and van Leeuwen's ("Maintenance of configurations in the plane",
//! 1981) without its concatenable queues: a balanced tree with the lines at its leaves, by slope, whose nodes each
//! know but where the envelopes of their two children cross. A query walks down, right where x is beyond the crossing.
//! A change finds those crossings on its way up anew that it moves, each by walking down both children at once:
//! O(log^2 n). Few move: a line that comes must be above the crossing, and one that goes must have been one of the two.

use std::ops::Range;

/// A line over x > 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Line {
    /// Its slope.
    pub alpha: f64,
    /// Its value at 0.
    pub beta: f64,
}

impl Line {
    pub(super) fn at(self, x: f64) -> f64 {
        self.alpha * x + self.beta
    }
}

const NONE: u32 = u32::MAX;
/// A child that has more than so many times the leaves of its sibling gives it some: a tree of bounded balance, with
/// the parameters that keep it so by one rotation at each node above a change (Hirai and Yamamoto, "Balancing
/// weight-balanced trees", 2011).
const OUTWEIGHS: u32 = 3;
/// Of these it gives its nearer child, or, if that has so many times the leaves of the other one, a part of it.
const DIVIDES: u32 = 2;

/// Lines by key.
#[derive(Debug)]
pub(super) struct Hull {
    nodes: Vec<Node>,
    unused: Vec<u32>,
    root: u32,
}

#[derive(Debug)]
enum Node {
    Leaf(Leaf),
    Fork(Fork),
}

/// All lines of one slope.
#[derive(Debug)]
struct Leaf {
    alpha: f64,
    /// The highest last; of equal ones the smaller key is the higher.
    lines: Vec<(f64, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Fork {
    left: u32,
    right: u32,
    leaves: u32,
    /// Slopes on the left are at most this, those on the right above it.
    middle: f64,
    crossing: Crossing,
}

/// What happens to a line.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Change {
    Comes,
    Goes,
}

/// Where the envelope of the right, which rises faster, becomes the higher one.
#[derive(Debug, Clone, Copy)]
struct Crossing {
    x: f64,
    y: f64,
    /// The lines that cross there.
    left: Line,
    right: Line,
}

impl Leaf {
    fn line(&self) -> Line {
        Line { alpha: self.alpha, beta: self.lines.last().expect("a leaf has a line").0 }
    }

    fn place(&self, beta: f64, key: u32) -> Result<usize, usize> {
        self.lines.binary_search_by(|&(other, other_key)| other.total_cmp(&beta).then(key.cmp(&other_key)))
    }
}

impl Default for Hull {
    fn default() -> Self {
        Self { nodes: Vec::new(), unused: Vec::new(), root: NONE }
    }
}

impl Hull {
    /// Many lines at once, in any order, under keys of their own: O(n log n), with one crossing for each.
    pub(super) fn of(mut lines: Vec<(u32, Line)>) -> Self {
        let order = |one: &(u32, Line), other: &(u32, Line)| {
            // There is but one zero.
            let by_slope = (one.1.alpha + 0.0).total_cmp(&(other.1.alpha + 0.0));
            by_slope.then(one.1.beta.total_cmp(&other.1.beta)).then(other.0.cmp(&one.0))
        };
        lines.sort_unstable_by(order);
        let mut hull = Self::default();
        for same in lines.chunk_by(|one, other| one.1.alpha == other.1.alpha) {
            let leaf =
                Leaf { alpha: same[0].1.alpha, lines: same.iter().map(|&(key, line)| (line.beta, key)).collect() };
            hull.nodes.push(Node::Leaf(leaf));
        }
        let leaves = hull.nodes.len() as u32;
        if leaves > 0 {
            hull.root = hull.join_leaves(0..leaves);
        }
        hull
    }

    /// A balanced tree of leaves that stand in the order of their slopes.
    fn join_leaves(&mut self, leaves: Range<u32>) -> u32 {
        if leaves.len() == 1 {
            return leaves.start;
        }
        let half = leaves.start.midpoint(leaves.end);
        let Node::Leaf(Leaf { alpha: middle, .. }) = self.nodes[half as usize - 1] else {
            unreachable!("forks stand behind all leaves")
        };
        let (left, right) = (self.join_leaves(leaves.start..half), self.join_leaves(half..leaves.end));
        let fork = self.joined(left, right, middle);
        self.add(Node::Fork(fork))
    }

    /// Takes a line in under a key that it is not in under.
    pub(super) fn insert(&mut self, key: u32, line: Line) {
        self.root = if self.root == NONE { self.add_leaf(key, line) } else { self.insert_below(self.root, key, line) };
    }

    /// Takes out what came in as this.
    ///
    /// # Panics
    /// If it is not there.
    pub(super) fn remove(&mut self, key: u32, line: Line) {
        self.root = self.remove_below(self.root, key, line);
    }

    /// The key of the line that is highest at x; of equal ones any.
    pub(super) fn top(&self, x: f64) -> Option<u32> {
        if self.root == NONE {
            return None;
        }
        let mut node = self.root;
        loop {
            match &self.nodes[node as usize] {
                Node::Leaf(leaf) => return leaf.lines.last().map(|&(_, key)| key),
                // Rather than by `crossing.x`, which is far off where slopes are nearly the same.
                Node::Fork(fork) => {
                    let Crossing { left, right, .. } = fork.crossing;
                    node = if right.at(x) > left.at(x) { fork.right } else { fork.left };
                }
            }
        }
    }

    fn add(&mut self, node: Node) -> u32 {
        if let Some(index) = self.unused.pop() {
            self.nodes[index as usize] = node;
            return index;
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    fn add_leaf(&mut self, key: u32, line: Line) -> u32 {
        self.add(Node::Leaf(Leaf { alpha: line.alpha, lines: vec![(line.beta, key)] }))
    }

    fn fork(&self, node: u32) -> Option<&Fork> {
        match &self.nodes[node as usize] {
            Node::Fork(fork) => Some(fork),
            Node::Leaf(_) => None,
        }
    }

    fn leaves(&self, node: u32) -> u32 {
        self.fork(node).map_or(1, |fork| fork.leaves)
    }

    /// Returns what stands in the node's place then.
    fn insert_below(&mut self, node: u32, key: u32, line: Line) -> u32 {
        match &mut self.nodes[node as usize] {
            Node::Leaf(leaf) if leaf.alpha == line.alpha => {
                let place = leaf.place(line.beta, key).unwrap_or_else(|place| place);
                leaf.lines.insert(place, (line.beta, key));
                node
            }
            Node::Leaf(leaf) => {
                let (is_right, middle) = (line.alpha > leaf.alpha, line.alpha.min(leaf.alpha));
                let other = self.add_leaf(key, line);
                let (left, right) = if is_right { (node, other) } else { (other, node) };
                let fork = self.joined(left, right, middle);
                self.add(Node::Fork(fork))
            }
            &mut Node::Fork(Fork { left, right, middle, .. }) => {
                if line.alpha <= middle {
                    let left = self.insert_below(left, key, line);
                    self.rejoin(node, (left, right), line, Change::Comes)
                } else {
                    let right = self.insert_below(right, key, line);
                    self.rejoin(node, (left, right), line, Change::Comes)
                }
            }
        }
    }

    fn remove_below(&mut self, node: u32, key: u32, line: Line) -> u32 {
        match &mut self.nodes[node as usize] {
            Node::Leaf(leaf) => {
                let place = leaf.place(line.beta, key).expect("only what is there is removed");
                leaf.lines.remove(place);
                if !leaf.lines.is_empty() {
                    return node;
                }
                self.unused.push(node);
                NONE
            }
            &mut Node::Fork(Fork { left, right, middle, .. }) => {
                let (mut left, mut right) = (left, right);
                if line.alpha <= middle {
                    left = self.remove_below(left, key, line);
                } else {
                    right = self.remove_below(right, key, line);
                }
                if left != NONE && right != NONE {
                    return self.rejoin(node, (left, right), line, Change::Goes);
                }
                self.unused.push(node);
                if left == NONE { right } else { left }
            }
        }
    }

    /// The node has these children now, as a line below it has come or gone.
    fn rejoin(&mut self, node: u32, (left, right): (u32, u32), line: Line, change: Change) -> u32 {
        let &Fork { middle, crossing, .. } = self.fork(node).expect("it has children");
        let (few, many) = (self.leaves(left), self.leaves(right));
        let fork = if many > few * OUTWEIGHS {
            self.rotated_left(left, right, middle)
        } else if few > many * OUTWEIGHS {
            self.rotated_right(left, right, middle)
        } else {
            let stays = match change {
                // Through the crossing is not above it. Before their first milestone all lines go through 0.
                Change::Comes => line.at(crossing.x) <= crossing.y,
                Change::Goes => line != crossing.left && line != crossing.right,
            };
            let same = Fork { left, right, leaves: few + many, middle, crossing };
            if stays { same } else { self.joined(left, right, middle) }
        };
        self.nodes[node as usize] = Node::Fork(fork);
        node
    }

    /// Two subtrees of which the right one is too heavy, with a part of it on the left.
    fn rotated_left(&mut self, left: u32, right: u32, middle: f64) -> Fork {
        let outer = *self.fork(right).expect("what is heavy has children");
        if self.leaves(outer.left) < DIVIDES * self.leaves(outer.right) {
            self.nodes[right as usize] = Node::Fork(self.joined(left, outer.left, middle));
            return self.joined(right, outer.right, outer.middle);
        }
        let inner = *self.fork(outer.left).expect("it is heavier than its sibling");
        self.nodes[right as usize] = Node::Fork(self.joined(left, inner.left, middle));
        self.nodes[outer.left as usize] = Node::Fork(self.joined(inner.right, outer.right, outer.middle));
        self.joined(right, outer.left, inner.middle)
    }

    /// The same if the left one is.
    fn rotated_right(&mut self, left: u32, right: u32, middle: f64) -> Fork {
        let outer = *self.fork(left).expect("what is heavy has children");
        if self.leaves(outer.right) < DIVIDES * self.leaves(outer.left) {
            self.nodes[left as usize] = Node::Fork(self.joined(outer.right, right, middle));
            return self.joined(outer.left, left, outer.middle);
        }
        let inner = *self.fork(outer.right).expect("it is heavier than its sibling");
        self.nodes[left as usize] = Node::Fork(self.joined(inner.right, right, middle));
        self.nodes[outer.right as usize] = Node::Fork(self.joined(outer.left, inner.left, outer.middle));
        self.joined(outer.right, left, inner.middle)
    }

    fn joined(&self, left: u32, right: u32, middle: f64) -> Fork {
        let leaves = self.leaves(left) + self.leaves(right);
        Fork { left, right, leaves, middle, crossing: self.crossing(left, right, middle) }
    }

    /// Where the envelopes of two subtrees cross. Slopes on the left are at most `middle`, those on the right above it,
    /// so the difference of the envelopes rises, and the crossing x is before or after where its sign is known.
    ///
    /// At a node's own crossing its envelope is known, and the other node's two lines bound the other envelope from
    /// below; that decides unless each crossing is above the other's lines. Then the right's crossing is the later one,
    /// and x is not both before the left's and after the right's: the first would need a line of the right, steeper
    /// than `middle`, that is above the left's crossing and not above the right's; the second one of the left, less
    /// steep, that is the other way round.
    fn crossing(&self, left: u32, right: u32, middle: f64) -> Crossing {
        let (mut left, mut right) = (left, right);
        loop {
            match (&self.nodes[left as usize], &self.nodes[right as usize]) {
                (Node::Leaf(one), Node::Leaf(other)) => {
                    let (left, right) = (one.line(), other.line());
                    let x = (left.beta - right.beta) / (right.alpha - left.alpha);
                    return Crossing { x, y: left.at(x), left, right };
                }
                (Node::Fork(fork), Node::Leaf(leaf)) => {
                    let is_before = leaf.line().at(fork.crossing.x) >= fork.crossing.y;
                    left = if is_before { fork.left } else { fork.right };
                }
                (Node::Leaf(leaf), Node::Fork(fork)) => {
                    // Of lines through one point not the highest, which is the next to leave.
                    let is_after = leaf.line().at(fork.crossing.x) > fork.crossing.y;
                    right = if is_after { fork.right } else { fork.left };
                }
                (Node::Fork(one), Node::Fork(other)) => {
                    let (at_left, at_right) = (one.crossing, other.crossing);
                    if at_right.left.at(at_left.x).max(at_right.right.at(at_left.x)) >= at_left.y {
                        left = one.left;
                    } else if at_left.left.at(at_right.x).max(at_left.right.at(at_right.x)) >= at_right.y {
                        right = other.right;
                    } else if at_right.y - at_left.y > middle * (at_right.x - at_left.x) {
                        right = other.left;
                    } else {
                        left = one.right;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive_top(lines: &[(u32, Line)], x: f64) -> Option<f64> {
        lines.iter().map(|(_, line)| line.at(x)).max_by(f64::total_cmp)
    }

    /// What is found may be another line only where rounding makes them equal.
    fn assert_top(hull: &Hull, lines: &[(u32, Line)], x: f64) {
        let found = hull.top(x).map(|key| lines.iter().find(|(other, _)| *other == key).expect("it is there").1.at(x));
        match (found, naive_top(lines, x)) {
            (Some(found), Some(expected)) => {
                assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{found} {expected} at {x}");
            }
            (found, expected) => assert_eq!(found.is_some(), expected.is_some()),
        }
    }

    /// Yields the leaves of a subtree.
    fn assert_balanced(hull: &Hull, node: u32) -> u32 {
        let Some(fork) = hull.fork(node) else { return 1 };
        let (left, right) = (assert_balanced(hull, fork.left), assert_balanced(hull, fork.right));
        assert!(left <= OUTWEIGHS * right && right <= OUTWEIGHS * left, "{left} and {right} leaves");
        assert_eq!(fork.leaves, left + right);
        left + right
    }

    fn depth(hull: &Hull, node: u32) -> u32 {
        hull.fork(node).map_or(0, |fork| 1 + depth(hull, fork.left).max(depth(hull, fork.right)))
    }

    proptest! {
        #[test]
        fn the_highest_line_is_found_whatever_comes_and_goes(
            steps in prop::collection::vec((0u8..16, 0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0), 1..300),
            kind in 0u8..3,
        ) {
            let mut hull = Hull::default();
            let mut lines: Vec<(u32, Line)> = Vec::new();
            for (key, &(action, alpha, beta, at)) in (0..).zip(&steps) {
                if action == 15 {
                    hull = Hull::of(lines.clone());
                } else if action < 5 && !lines.is_empty() {
                    let (key, line) = lines.swap_remove((at * lines.len() as f64) as usize);
                    hull.remove(key, line);
                } else {
                    // On a parabola all lines are on the envelope. Few slopes, so that some are the same.
                    let alpha = (alpha * 64.0).round() / 64.0 - 0.5;
                    // Those that have not come to a milestone go through 0.
                    let beta = [beta, -alpha * alpha, 0.0][usize::from(kind)];
                    let line = Line { alpha, beta };
                    hull.insert(key, line);
                    lines.push((key, line));
                }
                for x in [0.01, 0.3, 1.0, 3.0, 100.0 * at + 0.001] {
                    assert_top(&hull, &lines, x);
                }
                if hull.root != NONE {
                    assert_balanced(&hull, hull.root);
                }
            }
        }
    }

    #[test]
    fn slopes_in_order_do_not_make_it_deep() {
        let mut hull = Hull::default();
        let line = |key: u32| Line { alpha: f64::from(key), beta: -f64::from(key).powi(2) };
        (0..4096).for_each(|key| hull.insert(key, line(key)));
        // The logarithm of 4,096 to the base 4/3: no child has more than three quarters.
        assert!(depth(&hull, hull.root) <= 29, "{}", depth(&hull, hull.root));
        (0..4000).for_each(|key| hull.remove(key, line(key)));
        assert_eq!(hull.top(2.0 * 4050.0), Some(4050));
        (4000..4096).for_each(|key| hull.remove(key, line(key)));
        assert_eq!((hull.top(1.0), hull.unused.len()), (None, hull.nodes.len()));
    }
}
