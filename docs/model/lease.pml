/*
 * The lease: does one caller at a time hold it, by its own clock, and does nothing stay behind?
 *
 * One lock in one store, and callers who each acquire it once, under a holder of their own, keep it for a while and release
 * it. The store runs one script at a time. All else is as bad as it can be: any process may pause anywhere, for ever; a
 * caller may die; requests and answers are lost; and a request that was not answered may still come to the store at any
 * time later, and more than once.
 *
 * Time:        a tick may come at any moment. It takes one from whatever runs out, in the store and at the callers alike:
 *              they measure how long, and compare no clocks. A ttl is two ticks, the claim time is one.
 * The store:   left[h]     how long the grant to holder h still lasts; 0: there is none
 *              queue       the holders that wait
 *              waits[h]    holder h is in the queue, and whether it has asked since the last tick: then it counts as alive
 *              counted     the counter has the newest token; passed: the clock has passed it
 * The callers: asked[h]    what is left of the ttl that began when the last request was sent
 *              valid[h]    how long the lease is held, by the caller's own clock
 *
 * What is checked, wherever something changes:
 *     one        no other caller holds the lease (unless both share it), as long as the store has forgotten nothing
 *     others     a request ends, shortens and prolongs no grant of another holder: it may only hand on what is free
 *     own        no caller is kept waiting by its own grant
 *     nothing    a call that has ended has neither grant nor position, unless a request of it comes afterwards
 *     served     where a script has ended a grant and the lock is free, no living waiter is in the queue
 *     woken      no waiter sleeps for ever (in runs in which every request is answered)
 *     order      the lock goes to the living waiter that came first
 *     unclaimed  a hand-over that nobody confirms is over when the claim time is
 *     tokens     a grant has a greater token than all before it, even if the store has forgotten them
 *
 * The runs (-DCALLERS=3 ...): how many callers, how many requests without an answer (SILENCES), how many deaths (DEATHS);
 * RENEWED=3, a longer ttl for renewals; SHARED=1, any mix of shared and exclusive callers; FORGETS=1, the store forgets
 * everything once. TOGETHER=1 asserts that no two callers ever hold the lease at once: with SHARED this must be violated.
 * The rules, each of which can be taken out (-DWITHOUT_...): a violation then shows what it is for.
 *     SAME_HOLDER     a holder that asks again is granted what it has
 *     FRESH_HOLDER    each call has a holder of its own
 *     QUEUE           a newcomer is granted a free lock only if nobody waits
 *     POSITION        a waiter that asks again keeps its position
 *     LOOK_AGAIN      a waiter asks again after a while, although nobody has woken it
 *     HAND_OVER       the script that ends a grant also grants the lock to the first living waiter
 *     CLAIM_TIME      a hand-over lasts for the claim time only, until it is confirmed
 *     CLAIM_HOLDER    only the holder that has the lock can confirm it
 *     RELEASE_HOLDER  only the holder that has the lock can release it
 *     ABANDON         a call that ends without a lease undoes what it may have in the store
 *     NEVER_AGAIN     a renewal does not grant again what has run out
 *     NEVER_SHORTEN   a request that comes late does not shorten a grant that was renewed for longer
 *     BEFORE_SENT     a lease is valid from before its request was sent
 *     RELEASING       from before its release is sent, a lease does not count as held
 *     COUNTER         a token is above the last one
 *     SERVER_TIME     a token is not below the server's clock
 */
#ifndef CALLERS
#define CALLERS 2
#endif
#ifndef SILENCES
#define SILENCES 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef RENEWED
#define RENEWED TTL
#endif
#define TTL 2
#define CLAIM_TIME 1

#define MAX(a, b) ((a) > (b) -> (a) : (b))
#ifdef WITHOUT_CLAIM_TIME
#define HANDED_OVER TTL
#else
#define HANDED_OVER CLAIM_TIME
#endif
#ifdef WITHOUT_NEVER_SHORTEN
#define LONGER(a, b) (b)
#else
#define LONGER(a, b) MAX(a, b)
#endif
#ifdef WITHOUT_LOOK_AGAIN
#define WOKEN left[me]
#else
#define WOKEN (left[me] || asked[me] < TTL)
#endif
#ifdef WITHOUT_BEFORE_SENT
#define VALID TTL
#else
#define VALID asked[me]
#endif
#ifdef WITHOUT_COUNTER
#define NEW_TOKEN passed
#else
#ifdef WITHOUT_SERVER_TIME
#define NEW_TOKEN counted
#else
#define NEW_TOKEN (counted || passed)
#endif
#endif

/* requests */
#define ACQUIRE 0
#define CLAIM 1
#define RENEW 2
#define RELEASE 3
#define ABANDON 4
/* answers */
#define NONE 0
#define YES 1
#define NO 2
#define BUSY 3
/* waiters */
#define SILENT 1
#define ALIVE 2

byte left[3], waits[3];                       /* the store */
chan queue = [3] of { byte };
bit counted = 1, passed = 1, forgot;
byte asked[3], valid[3];                      /* the callers */
bit shared[3];
bit late[15];                                 /* the network: requests that may still come */
byte silences, deaths;
chan arrivals = [3] of { byte };              /* for the assertions: the waiters in the order in which they came, */
bit unclaimed[3], ended[3];                   /* hand-overs that were not confirmed, and calls whose end the store knows */
hidden byte before[3], head, i;

#define LATE(h, request) late[(h) * 5 + (request)]
#define HELD (left[0] || left[1] || left[2])
#define ALONE(h) (left[h] && !shared[h])
#define HELD_ALONE (ALONE(0) || ALONE(1) || ALONE(2))
#define TWO(g, h) (valid[g] && valid[h] && !(shared[g] && shared[h]))

/* To be called after each change, by d_steps only. */
inline check() {
	i = 0;
	do
	:: i < CALLERS -> assert(!ended[i] || !(left[i] || waits[i])); i++                 /* nothing */
	:: else -> break
	od;
#ifdef TOGETHER
	assert(!(valid[0] && valid[1]));
#endif
	assert(forgot || !(TWO(0, 1) || TWO(0, 2) || TWO(1, 2)))                           /* one */
}

inline leave(h) {
	if :: waits[h] -> queue??eval(h); arrivals??eval(h); waits[h] = 0 :: else fi
}

inline grant(h, ticks) {
	assert(NEW_TOKEN);                                                                 /* tokens */
	counted = 1;
#if defined(FORGETS) || defined(WITHOUT_COUNTER)
	passed = 0;
#endif
	left[h] = ticks
}

/* Hand the lock over to the first waiters that are alive, as many as may hold it together (queue.lua). */
inline serve() {
	do
	:: len(queue) && !HELD_ALONE ->
		queue?<head>;
		if
		:: waits[head] == SILENT -> leave(head)
		:: waits[head] == ALIVE && (!HELD || shared[head]) ->
			assert(arrivals?[eval(head)]);                                     /* order */
			leave(head);
			grant(head, HANDED_OVER);
			unclaimed[head] = 1
		:: else -> break
		fi
	:: else -> break
	od
}

inline end_grant(h) {
	left[h] = 0;
	unclaimed[h] = 0;
#ifndef WITHOUT_HAND_OVER
	serve();
#endif
	assert(HELD || !(waits[0] == ALIVE || waits[1] == ALIVE || waits[2] == ALIVE))     /* served */
}

inline confirm(h, ticks) {
	left[h] = LONGER(left[h], ticks);
	unclaimed[h] = 0;
	answer = YES
}

/* What the store does with a request of holder h: acquire.lua, claim.lua, renew.lua, release.lua, abandon.lua. */
inline run_script(request, h) {
	before[0] = left[0]; before[1] = left[1]; before[2] = left[2];
	if
	:: request == ACQUIRE ->
		ended[h] = 0;
		if
#ifndef WITHOUT_SAME_HOLDER
		:: left[h] -> skip
#endif
#ifdef WITHOUT_QUEUE
		:: !HELD -> assert(!len(arrivals)); grant(h, TTL)                          /* order */
#endif
		:: else ->
			assert(!left[h]);                                                  /* own */
			if
			:: !waits[h] -> queue!h; arrivals!h
#ifdef WITHOUT_POSITION
			:: waits[h] -> queue??eval(h); queue!h
#endif
			:: else
			fi;
			waits[h] = ALIVE;
			serve()
		fi;
		if :: left[h] -> confirm(h, TTL) :: else -> answer = BUSY fi
	:: request == CLAIM ->
		if
		:: left[h] -> confirm(h, TTL)
#ifdef WITHOUT_CLAIM_HOLDER
		:: !left[h] && HELD -> answer = YES
#endif
		:: else -> answer = NO
		fi
	:: request == RENEW ->
		if
		:: left[h] -> confirm(h, RENEWED)
#ifdef WITHOUT_NEVER_AGAIN
		:: !HELD -> confirm(h, RENEWED)
#endif
		:: else -> answer = NO
		fi
	:: request == RELEASE ->
		if
		:: left[h] -> end_grant(h)
#ifdef WITHOUT_RELEASE_HOLDER
		:: !left[h] && HELD -> left[0] = 0; left[1] = 0; left[2] = 0; serve()
#endif
		:: else
		fi;
		ended[h] = !waits[h];
		answer = YES
	:: request == ABANDON ->
		leave(h);
		end_grant(h);
		ended[h] = 1;
		answer = YES
	fi;
	i = 0;
	do
	:: i < CALLERS -> assert(i == h || before[i] == left[i] || !before[i]); i++        /* others */
	:: else -> break
	od;
	check()
}

#define UNANSWERED(request) silences < SILENCES -> silences++; LATE(me, request) = 1; answer = NONE

/* Send a request, which comes to the store when the store is `ready`, and wait for the answer; or for none. */
inline ask(request, ready) {
	if
	:: atomic {
		ready -> d_step { run_script(request, me); if :: answer != YES -> asked[me] = 0 :: else fi };
		if :: true :: UNANSWERED(request); asked[me] = 0 fi
	   }
	:: atomic { UNANSWERED(request); asked[me] = 0 }
	:: atomic { deaths < DEATHS -> deaths++; goto dies }
	fi
}

proctype Caller(byte me) {
	byte answer;
	atomic {                            /* all are alike, so it makes no difference which of them comes first */
#ifdef SHARED
		if :: shared[me] = 1 :: true fi;
#endif
		if :: me + 1 < CALLERS -> run Caller(me + 1) :: else fi
	}
acquires:
	do
	:: d_step { answer == YES && asked[me] -> valid[me] = VALID; asked[me] = 0; answer = NONE; check() }; goto holds
	:: answer == BUSY -> asked[me] = TTL; ask(CLAIM, WOKEN)                         /* it sleeps meanwhile */
	:: answer != BUSY && !asked[me] -> asked[me] = TTL; ask(ACQUIRE, true)
	:: !asked[me] -> break                                                             /* it gives up */
	od;
	atomic { asked[me] = 0; answer = NONE }
#ifdef WITHOUT_ABANDON
	d_step { ended[me] = 1; check() };
#else
	do
	:: answer != YES -> ask(ABANDON, true)
	:: answer == YES -> break
	od;
#endif
	goto over;
holds:
	do
	:: valid[me] && valid[me] < RENEWED ->                                             /* there is something to renew */
		asked[me] = RENEWED;
		ask(RENEW, true);
		d_step {
			if
			:: answer == YES && valid[me] -> valid[me] = MAX(valid[me], asked[me])
			:: answer == NO -> valid[me] = 0                                   /* it is lost */
			:: else
			fi;
			asked[me] = 0;
			answer = NONE;
			check()
		}
	:: break
	od;
#ifndef WITHOUT_RELEASING
	valid[me] = 0;
#endif
	do
	:: answer != YES -> ask(RELEASE, true)
	:: answer == YES -> valid[me] = 0; break
	od;
over:
#ifdef WITHOUT_FRESH_HOLDER
	if :: answer = NONE; ended[me] = 0; goto acquires :: true fi;
#endif
	goto done;
dies:
	atomic { valid[me] = 0; asked[me] = 0 };
done:
	answer = NONE
}

proctype Network(byte me) {
	byte answer;
end:	do
	:: d_step { LATE(me, ACQUIRE) -> run_script(ACQUIRE, me); answer = NONE }
	:: d_step { LATE(me, CLAIM) -> run_script(CLAIM, me); answer = NONE }
	:: d_step { LATE(me, RENEW) -> run_script(RENEW, me); answer = NONE }
	:: d_step { LATE(me, RELEASE) -> run_script(RELEASE, me); answer = NONE }
	:: d_step { LATE(me, ABANDON) -> run_script(ABANDON, me); answer = NONE }
	od
}

#define RUNS(h) (left[h] || asked[h] || valid[h] || waits[h] == ALIVE)
#define LESS(ticks) ticks = (ticks -> ticks - 1 : 0)

proctype Time() {
end:	do
	:: d_step {
		RUNS(0) || RUNS(1) || RUNS(2) ->
		i = 0;
		do
		:: i < CALLERS ->
			LESS(left[i]);
			LESS(asked[i]);
			LESS(valid[i]);
			if :: waits[i] -> waits[i] = SILENT :: else fi;
			if :: unclaimed[i] -> assert(!left[i]); unclaimed[i] = 0 :: else fi; /* unclaimed */
			i++
		:: else -> break
		od;
		passed = 1
	   }
#ifdef FORGETS
	:: d_step {
		!forgot ->
		forgot = 1;
		counted = 0;
		passed = 1;
		i = 0;
		do
		:: i < CALLERS -> left[i] = 0; unclaimed[i] = 0; leave(i); i++
		:: else -> break
		od;
		skip
	   }
#endif
	od
}

init {
	byte started;
	atomic {
		run Time();
		do :: started < CALLERS -> run Network(started); started++ :: else -> break od;
		run Caller(0)
	};
	timeout -> assert(_nr_pr == CALLERS + 2)                                            /* woken */
}
