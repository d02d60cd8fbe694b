/*
 * The fence: do critical sections stay serial in the database when the lock service helps nobody?
 *
 * The lock service of this model is the worst there can be: it grants every lock to everybody, at any moment, with any
 * token, the same one twice if it likes (a store that forgets). Any process may pause anywhere, for ever. What remains
 * is one row of `dlock_fence` in the database, with a row lock, and this row alone has to keep the sections apart.
 *
 * The row:    x, owner   token and holder of the newest exclusive section that was admitted (column token, holder)
 *             s          the mark of shared sections (column s_token)
 * Its lock:   exclusive  some transaction has the row locked for itself (FOR UPDATE, UPDATE)
 *             shares     how many transactions have it locked for share (FOR SHARE)
 * The data:   v          changed by each COMMIT of an exclusive section, which has read both v and sum: a closing
 *             sum        counted up by each COMMIT of a shared section, which has read v: a posting
 *
 * What is checked is guarantee 1, at each COMMIT: nobody whom the lock excludes has committed since this section read.
 * A section is one lease with two transactions; it reads in the first and goes by what it read in both. What was
 * read in a transaction that was rolled back counts for nothing: the section reads again.
 *
 * The sections, by the form of their fence (`fence=` of `lock`), and how many of each are started (-DXT=1 ...):
 *     XT  exclusive, "transaction"      XL  exclusive, "lease"
 *     ST  shared,    "transaction"      SL  shared,    "lease"
 * The rules, each of which can be taken out (-DWITHOUT_...): a violation then shows what it is for.
 *     MARK          a shared section works only while the mark is above x, and sets it if it is not
 *     SAME          the later transactions of a shared section find the x that its first one found
 *     S_TOKEN       an exclusive section is refused, at its admit and at each COMMIT, once the mark has reached its token
 *     HOLDER        the row is ours only with our holder in it: a forgetful store gives one token to two
 *     ROW_LOCK      the confirm before COMMIT locks the row (a plain SELECT does not)
 *     RAISE         the row is raised before anything is read (not only looked at when something is written)
 * -DTOGETHER=1 asserts that no two shared sections are ever inside at once: this must be violated.
 */
#ifndef XT
#define XT 0
#endif
#ifndef XL
#define XL 0
#endif
#ifndef ST
#define ST 0
#endif
#ifndef SL
#define SL 0
#endif
#ifndef TOKENS
#define TOKENS 3
#endif

#ifdef WITHOUT_MARK
#define MARKED true
#else
#define MARKED (s > x)
#endif
#ifdef WITHOUT_SAME
#define SAME true
#else
#define SAME (!known || x == found)
#endif
#ifdef WITHOUT_S_TOKEN
#define ABOVE_MARK true
#else
#define ABOVE_MARK (s < token)
#endif
#ifdef WITHOUT_HOLDER
#define OURS (x == token)
#else
#define OURS (x == token && owner == me)
#endif
#ifdef WITHOUT_ROW_LOCK
#define UNLOCKED true
#else
#define UNLOCKED (!exclusive && shares == 0)
#endif

byte x, owner, s;      /* the row */
bit exclusive;         /* its lock */
byte shares;
byte v, sum;           /* the data */

#define FREE (!exclusive && shares == 0)
#define NEWER ((x < token || OURS) && ABOVE_MARK)

inline grant() {       /* the lock service: anything, to anybody */
	if :: token = 1 :: token = 2 :: token = 3 fi
}

/* Each exclusive COMMIT changes v; its own changes are no surprise to a section. */
inline commit_exclusive() {
	assert(v == seen_v && sum == seen_sum);
	v++; seen_v = v
}
inline commit_shared() {
	assert(v == seen_v);
	sum++
}

/* fence="transaction": the admit is the first statement, and keeps the row locked to COMMIT. The raise is seen by others
 * when it is committed, and not at all after a rollback. */
proctype ExclusiveTransaction(byte me) {
	byte token, seen_v, seen_sum, turn;
	bit has_read;
	grant();
	do
	:: turn < 2 ->
		turn++;
		atomic { FREE -> if :: NEWER -> exclusive = 1 :: else -> goto refused fi }
		if :: has_read -> skip
		   :: else -> atomic { seen_v = v; seen_sum = sum; has_read = 1 }
		fi;
		if :: atomic { commit_exclusive(); x = token; owner = me; exclusive = 0 }
		   :: turn == 1 -> atomic { has_read = 0; exclusive = 0 }         /* ROLLBACK */
		fi
	:: else -> break
	od;
refused: skip
}

/* fence="lease": the row is raised right after the grant; each transaction ends with a confirm. */
proctype ExclusiveLease(byte me) {
	byte token, seen_v, seen_sum, turn;
	grant();
#ifndef WITHOUT_RAISE
	atomic { FREE -> if :: NEWER -> x = token; owner = me :: else -> goto refused fi }
#endif
	atomic { seen_v = v; seen_sum = sum };
	do
	:: turn < 2 ->
		turn++;
#ifdef WITHOUT_RAISE
		atomic { FREE -> if :: x <= token -> x = token; owner = me; exclusive = 1 :: else -> goto refused fi };
		atomic { commit_exclusive(); exclusive = 0 }
#else
		atomic { UNLOCKED -> if :: OURS && ABOVE_MARK -> 
#ifndef WITHOUT_ROW_LOCK
			exclusive = 1
#else
			skip
#endif
			:: else -> goto refused fi };
		atomic { commit_exclusive();
#ifndef WITHOUT_ROW_LOCK
			exclusive = 0
#endif
		}
#endif
	:: else -> break
	od;
refused: skip
}

/* fence="transaction", shared: before the transaction, a look at the row, and the mark, in a transaction of its own, where
 * it is missing. Then the row is locked for share, to COMMIT. Where the mark is missing all the same (the lock was asked
 * for inside a transaction; somebody came between) it is set in this transaction, which keeps the row for itself. */
proctype SharedTransaction(byte me) {
	byte token, seen_v, found, turn;
	bit has_read, known, alone;
	grant();
	if :: MARKED -> skip
	   :: !MARKED -> atomic { FREE -> if :: x < token && s <= x -> s = token :: else -> skip fi }
	   :: skip                                                        /* inside an open transaction nothing is prepared */
	fi;
	do
	:: turn < 2 ->
		turn++;
		atomic {
			if :: !exclusive && MARKED -> if :: x < token && SAME -> shares++ :: else -> goto refused fi
			   :: FREE && !MARKED -> if :: x < token && SAME -> exclusive = 1; alone = 1 :: else -> goto refused fi
			fi;
			found = x; known = 1
		}
		if :: has_read -> skip :: else -> atomic { seen_v = v; has_read = 1 } fi;
#ifdef TOGETHER
		assert(shares < 2);
#endif
		atomic {
			if :: commit_shared(); if :: alone && s < token -> s = token :: else -> skip fi
			   :: turn == 1 -> has_read = 0                               /* ROLLBACK: a mark that was set here goes, too */
			fi;
			if :: alone -> exclusive = 0; alone = 0 :: else -> shares-- fi
		}
	:: else -> break
	od;
refused: skip
}

/* fence="lease", shared: the mark is raised to our token right after the grant; the confirm looks for a newer x. */
proctype SharedLease(byte me) {
	byte token, seen_v, turn;
	grant();
	atomic { FREE -> if :: x < token -> if :: s < token -> s = token :: else -> skip fi :: else -> goto refused fi }
	seen_v = v;
	do
	:: turn < 2 ->
		turn++;
		atomic { !exclusive -> if :: x < token -> shares++ :: else -> goto refused fi }
		atomic { commit_shared(); shares-- }
	:: else -> break
	od;
refused: skip
}

#define START(number, section, first) i = 0; do :: i < number -> i++; run section(first + i) :: else -> break od

init {
	byte i;
	atomic {
		START(XT, ExclusiveTransaction, 0);
		START(XL, ExclusiveLease, 10);
		START(ST, SharedTransaction, 20);
		START(SL, SharedLease, 30)
	}
}
