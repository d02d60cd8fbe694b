/*
 * The fence in the row itself (`FencedMixin`): do sections stay serial while the row is created, when the lock service
 * helps nobody?
 *
 * The fence is in two places: the row, whose token is 0 until it is first raised, and `dlock_fence`, which takes its
 * place until then. The sections are exclusive, each is one lease with two transactions, and any of these may create the
 * row. Somebody who does not use the lock may create it, too, at any moment. The service is that of fence.pml: it grants
 * everybody any token, the same one twice if it likes. With -DDELETES somebody deletes the row as well: a section of
 * several transactions of the first form is not protected then.
 *
 * The table:  x, x_owner, x_locked   token and holder of the newest section that was admitted there; the lock of that row
 * The row:    exists                 whether it was created by a transaction that has committed
 *             r, r_owner, r_locked   its token and holder, and its lock
 * The data:   v                      read by each section, and changed by each COMMIT of one
 *
 * What is checked is guarantee 1, at each COMMIT: no other section has committed since this one read.
 *
 * The sections: XT  fence="transaction"      XL  fence="lease"
 * The rules, each of which can be taken out (-DWITHOUT_...):
 *     FIRST_TOKEN   a row without a token is raised only by a section that was admitted in the table
 *     LOOK_AGAIN    after it was admitted in the table, a section raises the row if that exists by now
 *     ROW_ALONE     once it has raised the row, a lease is no longer confirmed by the table
 *     BOTH          at COMMIT a lease that was announced in the table is confirmed there, and raises the row
 */
#ifndef XT
#define XT 0
#endif
#ifndef XL
#define XL 0
#endif

#ifdef WITHOUT_FIRST_TOKEN
#define HAS_TOKEN exists
#else
#define HAS_TOKEN (exists && r > 0)
#endif

byte x, x_owner;
bit x_locked;
bit exists;
byte r, r_owner;
bit r_locked;
byte v;

#ifdef WITHOUT_ROW_ALONE
#define LEFT_TO_ROW false
#else
#define LEFT_TO_ROW (is_lease && (in_row || raises_made))
#endif

#define R_OURS (r == token && r_owner == me)
#define X_OURS (x == token && x_owner == me)
#define R_NEWER (r < token || R_OURS)
#define X_NEWER (x < token || X_OURS)

inline grant() {
	if :: token = 1 :: token = 2 :: token = 3 fi
}

/* Raise a row that has a token, and keep it locked. A plain look, which is another statement, finds what to do else. */
inline raise_row() {
	atomic { !r_locked || !HAS_TOKEN ->
		if :: HAS_TOKEN && R_NEWER -> r_locked = 1; in_row = 1 :: else -> skip fi };
	if :: in_row -> skip
	   :: !in_row -> if :: HAS_TOKEN -> goto refused :: else -> skip fi
	fi
}

inline admit_in_table() {
	atomic { !x_locked -> if :: X_NEWER -> x_locked = 1; in_table = 1 :: else -> goto refused fi }
}

inline raise_row_after_table() {
#ifndef WITHOUT_LOOK_AGAIN
	atomic { !r_locked || !exists || in_row ->
		if :: in_row || !exists -> skip
		   :: !in_row && exists && R_NEWER -> r_locked = 1; in_row = 1
		   :: !in_row && exists && !R_NEWER -> goto refused
		fi }
#else
	skip
#endif
}

inline admit() {
	raise_row();
	if :: in_row -> skip
	   :: else -> admit_in_table(); raise_row_after_table()
	fi
}

/* What was raised is seen by others when it is committed, and not at all after a rollback. */
inline end(commits) {
	if :: commits && in_table -> x = token; x_owner = (LEFT_TO_ROW -> 0 : me) :: else -> skip fi;
	if :: commits && in_row -> r = token; r_owner = me :: else -> skip fi;
	if :: in_table -> x_locked = 0 :: else -> skip fi;
	if :: in_row -> r_locked = 0 :: else -> skip fi;
	in_table = 0; in_row = 0
}

/* Two transactions that create one row: the second fails. One that has created it raises it in its confirm. */
inline commit_section() {
	if :: made && exists -> end(false); goto refused :: else -> skip fi;
	assert(v == seen);
	v++; seen = v;
	if :: made -> exists = 1; r = (raises_made -> token : 0); r_owner = (raises_made -> me : 0) :: else -> skip fi;
	end(true)
}

proctype Transaction(byte me) {
	byte token, seen, turn;
	bit is_lease, has_read, in_table, in_row, made, raises_made;
	grant();
	do
	:: turn < 2 ->
		turn++;
		admit();
		if :: has_read -> skip :: else -> atomic { seen = v; has_read = 1 } fi;
		if :: !exists -> made = 1 :: made = 0 fi;
		if :: atomic { commit_section() }
		   :: turn == 1 -> atomic { has_read = 0; end(false) }
		fi
	:: else -> break
	od;
refused: atomic { end(false) }
}

proctype Lease(byte me) {
	byte token, seen, turn;
	bit is_lease, in_table, in_row, made, raises_made;
	is_lease = 1;
	grant();
	admit();
	atomic { end(true) };
	atomic { seen = v };
	do
	:: turn < 2 ->
		turn++;
		if :: !exists -> made = 1 :: made = 0 fi;
		raises_made = 0;
		/* confirm */
		atomic { !r_locked || !exists ->
			if :: exists && R_OURS -> r_locked = 1; in_row = 1 :: else -> skip fi };
		if :: in_row -> skip
		   :: else ->
			raise_row();
#ifndef WITHOUT_BOTH
			atomic { !x_locked -> if :: X_OURS -> x_locked = 1; in_table = 1 :: else -> goto refused fi };
			raise_row_after_table();
			raises_made = made
#endif
		fi;
		atomic { commit_section() }
	:: else -> break
	od;
refused: atomic { end(false) }
}

proctype Somebody() {
	atomic { if :: exists -> skip :: else -> exists = 1 fi }
#ifdef DELETES
	atomic { exists && !r_locked -> exists = 0; r = 0; r_owner = 0 }
#endif
}

#define START(number, section, first) i = 0; do :: i < number -> i++; run section(first + i) :: else -> break od

init {
	byte i;
	atomic {
		START(XT, Transaction, 0);
		START(XL, Lease, 10);
		run Somebody()
	}
}
