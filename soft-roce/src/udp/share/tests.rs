//! Members on a model of the kernel's group: sockets in a list from which the last is moved into a hole, and a program
//! for all.

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::*;

const MEMBERS: usize = 6;

/// Runs a program as the kernel does.
fn run(program: &[Instruction], packet: &[u8]) -> u32 {
    let (mut at, mut loaded) = (0, 0);
    loop {
        let Instruction { code, jump_true, jump_false, operand } = program[at];
        at += 1;
        match u32::from(code) {
            0x30 => loaded = u32::from(packet[operand as usize]),
            0x15 => at += usize::from(if loaded == operand { jump_true } else { jump_false }),
            0x06 => return operand,
            0x16 => return loaded,
            other => panic!("no such instruction: {other:#x}"),
        }
    }
}

struct World {
    rng: StdRng,
    now: Timestamp,
    /// By index: numbers of members.
    group: Vec<usize>,
    program: Vec<Instruction>,
    table: Table,
    members: BTreeMap<usize, Member>,
    next_member: usize,
    loss: f64,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            now: Timestamp(0),
            group: Vec::new(),
            program: program(&Table::new()),
            table: Table::new(),
            members: BTreeMap::new(),
            next_member: 0,
            loss: 0.1,
        }
    }

    fn join(&mut self) {
        let free: Vec<u8> = (0..MEMBERS as u8)
            .filter(|&prefix| self.members.values().all(|member| member.prefix() != prefix))
            .collect();
        let prefix = free[self.rng.random_range(0..free.len())];
        self.members.insert(self.next_member, Member::new(self.now, prefix, self.rng.random()));
        self.group.push(self.next_member);
        self.next_member += 1;
    }

    fn die(&mut self) {
        let index = self.rng.random_range(0..self.group.len());
        let member = self.group.swap_remove(index);
        self.members.remove(&member);
    }

    /// Who gets the packet; a sender's packets without a valid index all go to the same one.
    fn receiver(&self, packet: &[u8], sender: usize) -> usize {
        let index = run(&self.program, packet) as usize;
        self.group.get(index).copied().unwrap_or_else(|| self.group[sender * 7 % self.group.len()])
    }

    fn step(&mut self) {
        self.now = self.now + Duration::from_micros(self.rng.random_range(100..3000));
        for number in self.members.keys().copied().collect::<Vec<_>>() {
            // Now and then one does not run.
            if self.rng.random_bool(0.2) {
                continue;
            }
            let member = self.members.get_mut(&number).unwrap();
            member.handle_timeout(self.now, true);
            while let Some(action) = self.members.get_mut(&number).and_then(|member| member.poll_action(self.now)) {
                self.act(number, action);
            }
        }
    }

    fn act(&mut self, number: usize, action: Action) {
        let live = self.members.len();
        match action {
            Action::Send(probe) => {
                let packet = probe.to_bytes();
                let receiver = self.receiver(&packet, number);
                if !self.rng.random_bool(self.loss) {
                    let received = Probe::parse(&packet).unwrap();
                    assert_eq!(received, probe);
                    self.members.get_mut(&receiver).unwrap().handle_probe(self.now, received);
                }
            }
            Action::Count => self.members.get_mut(&number).unwrap().handle_count(self.now, live),
            Action::Publish { index } => {
                let outcome = if self.rng.random_bool(0.2) {
                    Published::Locked
                } else if usize::from(index) >= live {
                    Published::Refused
                } else {
                    let prefixes: Vec<_> = self.members.values().map(Member::prefix).collect();
                    self.table.retain(|prefix, _| prefixes.contains(prefix));
                    self.table.insert(self.members[&number].prefix(), index);
                    self.program = program(&self.table);
                    Published::Done
                };
                self.members.get_mut(&number).unwrap().handle_published(self.now, outcome);
            }
        }
    }

    /// Whether every member's packets reach it, whoever sends them.
    fn is_right(&self) -> bool {
        self.members.iter().all(|(&number, member)| {
            let mut packet = [0; 16];
            packet[TARGET_AT] = member.prefix();
            (0..10).all(|sender| self.receiver(&packet, sender) == number)
        })
    }
}

#[test]
fn everyone_is_reached_again_after_any_deaths() {
    for seed in 0..500 {
        let mut world = World::new(seed);
        for _ in 0..8 {
            for _ in 0..world.rng.random_range(1..4) {
                if world.members.len() < MEMBERS && world.rng.random_bool(0.6) {
                    world.join();
                } else if world.members.len() > 1 {
                    world.die();
                }
                (0..world.rng.random_range(0..20)).for_each(|_| world.step());
            }
            world.loss = 0.0;
            // 20 ms until a check, a search, and pauses between: 200 steps are 300 ms.
            let steps = (0..200).position(|_| {
                world.step();
                world.is_right() && world.members.values().all(Member::is_reachable)
            });
            assert!(steps.is_some(), "seed {seed}: {world:?}", world = (&world.group, &world.table, &world.members));
            world.loss = 0.1;
        }
    }
}

#[test]
fn a_program_steers_by_table_and_search_by_index() {
    let program = program(&Table::from([(3, 1), (9, 0)]));
    let steered = |first: u8, target: u8| run(&program, &[first, 0, 0, 0, 0, target]);
    assert_eq!((steered(0x0c, 3), steered(0x0c, 9), steered(CHECK, 3)), (1, 0, 1));
    assert_eq!(steered(0x0c, 4), u32::MAX, "nobody's");
    assert_eq!((steered(SEARCH, 3), steered(SEARCH, 63)), (3, 63));
}

#[test]
fn probes_are_no_packets() {
    for probe in [Probe::Search { index: 7, token: u64::MAX }, Probe::Check { prefix: 7, token: 1 }] {
        let bytes = probe.to_bytes();
        assert_eq!(Probe::parse(&bytes), Some(probe));
        assert!(crate::wire::Packet::new_checked(&bytes).is_err());
        assert_eq!(Probe::parse(&bytes[1..]), None);
    }
    assert_eq!(Probe::parse(&[0x0c; PROBE_BYTES]), None);
}
