/*
 * The listener of an event loop: does it give back only what no call has?
 *
 * When a lock is handed over to a task, a list in the store names the task, and the listener of its loop confirms the grant
 * (confirm.lua). If the task is not waiting at that moment, either it is about to ask, and will find the grant, or it has
 * given up, and the listener has to give the grant back after a while. What it must not give back is the lease of a living
 * call. Task and listener speak to the store over connections of their own, so any answer may come late, or never.
 *
 * There is one lock and one task; all others together are `Others`. Nothing is timed: what takes a time may be over at once.
 *
 * The store:    grant      who has the lock; confirmed: for the whole ttl, not only for the claim time
 *               queued     the task is in the queue
 *               notices    how often the list names the task
 * The listener: runs       it has a connection
 *               unclaimed  it has heard of a grant for which the task was not waiting
 *               found      the task has been granted the lock since the listener's sleep began
 * The task:     asks       it asks the store, or is about to
 *               waits      it waits for the listener; told: the listener has given it what it heard of
 *               holds      it holds the lease
 *
 * What is checked: a task that holds the lease has the grant.
 * The rules, each of which can be taken out (-DWITHOUT_...): a violation then shows what it is for.
 *     ASKS        nothing is given back that a task asks for, or is about to
 *     FOUND       what is heard when the task has found its grant by itself is not kept
 *     UNCLAIMED   what was heard before that is forgotten, whether or not the listener runs
 *     NOTICES     each request of a task takes it off the list, whatever the answer
 */
#define NOBODY 0
#define TASK 1
#define OTHER 2

byte grant, notices;                  /* the store */
bit confirmed, queued;
bit runs, unclaimed, found;           /* the listener */
bit asks, waits, told, holds;         /* the task */

#ifdef WITHOUT_ASKS
#define POLLS 0
#else
#define POLLS 1
#endif
#ifdef WITHOUT_FOUND
#define IS_NEWS true
#else
#define IS_NEWS (!found)
#endif
#ifdef WITHOUT_UNCLAIMED
#define IS_OUTDATED runs
#else
#define IS_OUTDATED true
#endif

inline acquire() {
#ifdef WITHOUT_NOTICES
	if :: grant == TASK && notices -> notices-- :: else fi;
#else
	notices = 0;
#endif
	if
	:: grant == OTHER -> queued = 1
	:: else -> grant = TASK; confirmed = 1; queued = 0
	fi;
	granted = (grant == TASK)
}

inline abandon() {
	queued = 0;
	if :: grant == TASK -> grant = NOBODY :: else fi
}

inline hold() {
	assert(grant == TASK);
	holds = 1
}

proctype Task() {
	bit granted;
	asks = 1;
	do
	:: asks -> atomic { acquire() };
		if
		:: atomic { granted -> asks = 0; found = runs; if :: IS_OUTDATED -> unclaimed = 0 :: else fi; hold() }
		:: atomic { !granted -> asks = 0; if :: unclaimed -> unclaimed = 0; hold() :: else -> waits = 1 fi }
		:: atomic { !granted -> asks = POLLS }; asks = 1            /* another library has the lock: it does not wait */
		:: true                                                     /* the answer is lost, and it asks again */
		fi
	:: atomic { waits -> waits = 0; asks = 1 }                          /* it looks again */
	:: atomic { told -> told = 0; hold() }
	:: atomic { asks || waits -> asks = 0; waits = 0; abandon() };      /* it gives up, */
		atomic { acquire() }; break                                 /* and a request of it comes after that */
	od
}

proctype Listener() {
	bit heard, gives_back;
	do
	:: runs = 1;
		do
		:: found = 0;                                               /* it sleeps, until the list names the task, */
			if
			:: atomic { notices -> notices = 0; heard = (grant == TASK); if :: heard -> confirmed = 1 :: else fi }
			:: true                                             /* or for long enough */
			fi;
			if
			:: atomic { heard && waits -> waits = 0; told = 1 }
			:: atomic { heard && !waits -> if :: IS_NEWS -> unclaimed = 1 :: else fi }
			:: !heard
			:: break                                            /* the answer is lost, and the connection with it */
			fi;
			heard = 0;
			if
			:: atomic { unclaimed -> unclaimed = 0; gives_back = !asks };  /* it has heard of it a while ago */
				if :: atomic { gives_back -> assert(!holds); abandon() } :: !gives_back fi
			:: true
			fi;
			gives_back = 0
		od;
		atomic { runs = 0; heard = 0 }
	od
}

/* They take the lock and release it, which hands it over. A hand-over runs out unless it is confirmed. */
proctype Others() {
	do
	:: atomic { grant == NOBODY && !queued -> grant = OTHER }
	:: atomic { grant != TASK && queued -> queued = 0; grant = TASK; confirmed = 0; notices++ }
	:: atomic { grant == OTHER && !queued -> grant = NOBODY }
	:: atomic { grant == TASK && !confirmed -> grant = NOBODY }
	od
}

init { atomic { run Task(); run Listener(); run Others() } }
