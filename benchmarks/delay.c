/* Forwards TCP connections on loopback and delays what passes in each direction; delay.py says how it is used.

   One thread, epoll, and one timer for what is due next. The delay is counted from when the kernel received the bytes, so that
   a proxy which is woken late is not late itself; with the right to it, it runs before all ordinary processes, as a network
   does not wait for them either.

   Arguments: for each forward, the descriptor of a listening socket, and the server's IPv4 address and port.
   Commands on stdin: `delay NANOSECONDS` for each direction, `counts`. It ends with stdin. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256, READ_SIZE = 256 * 1024, MOST_QUEUED = 64 * 1024 * 1024, MOST_FORWARDS = 16, LINE = 128 };
static const int64_t SECOND = 1000000000;

enum kind { DATA, END, RESET };

struct chunk {
    struct chunk *next;
    int64_t due;
    enum kind kind;
    size_t size, sent;
    char bytes[];
};

/* What an event belongs to: a listening socket, one end of a connection, the timer, or stdin. */
enum what { LISTENER, CONNECTION, TIMER, COMMANDS };

struct forward {
    enum what what;
    int listener;
    struct sockaddr_in server;
    long long connections, exchanges, sent, received; /* bytes sent by clients, and received by them */
    long long delivered, late;                        /* writes, and the nanoseconds by which they were late in total */
};

/* One direction of a connection: bytes are read from `from`, and written to the socket of the opposite direction. */
struct direction {
    enum what what;
    struct link *link;
    struct direction *opposite;
    int from;
    int64_t earliest, last_due; /* nothing arrives before; nothing is due before what was sent earlier */
    struct chunk *first, *last;
    size_t queued, place;                   /* place in the heap, from 1; 0: not in it */
    bool read_all, written_all, blocked, full; /* blocked: the receiver's buffer is full; full: ours is */
    uint32_t watched;
};

struct link {
    struct direction up, down; /* from the client; from the server */
    struct forward *forward;
    bool dead, client_spoke;
    struct link *next;
};

static int polled, timer;
static int64_t delay, timer_at;
static struct direction **heap;
static size_t heaped, heap_room;
static struct link *graveyard; /* closed while events of the same wake-up may still refer to them */
static struct forward forwards[MOST_FORWARDS];
static int forward_count;
static const enum what timer_event = TIMER, commands_event = COMMANDS;

static int64_t now(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * SECOND + at.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* --- the heap: directions with something to write, by when it is due --------------------------------------------------- */

static void put(size_t place, struct direction *one) {
    heap[place - 1] = one;
    one->place = place;
}

static void sift(size_t place, struct direction *one) {
    while (place > 1 && heap[place / 2 - 1]->first->due > one->first->due) {
        put(place, heap[place / 2 - 1]);
        place /= 2;
    }
    for (size_t child; (child = 2 * place) <= heaped; place = child) {
        if (child < heaped && heap[child]->first->due < heap[child - 1]->first->due)
            child++;
        if (heap[child - 1]->first->due >= one->first->due)
            break;
        put(place, heap[child - 1]);
    }
    put(place, one);
}

static void schedule(struct direction *one) {
    if (one->place || !one->first || one->blocked)
        return;
    if (heaped == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 64;
        if (!(heap = realloc(heap, heap_room * sizeof *heap)))
            fail("realloc");
    }
    sift(++heaped, one);
}

static void unschedule(struct direction *one) {
    if (!one->place)
        return;
    struct direction *moved = heap[--heaped];
    if (moved != one)
        sift(one->place, moved);
    one->place = 0;
}

/* --- connections ------------------------------------------------------------------------------------------------------- */

static void watch(struct direction *one) {
    uint32_t wanted = (one->read_all || one->full ? 0 : EPOLLIN) | (one->opposite->blocked ? EPOLLOUT : 0);
    if (wanted == one->watched)
        return;
    struct epoll_event event = {.events = wanted, .data.ptr = one};
    int change = !wanted ? EPOLL_CTL_DEL : one->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (epoll_ctl(polled, change, one->from, &event))
        fail("epoll_ctl");
    one->watched = wanted;
}

static void discard(struct direction *one) {
    unschedule(one);
    while (one->first) {
        struct chunk *next = one->first->next;
        free(one->first);
        one->first = next;
    }
    one->last = NULL;
    one->queued = 0;
}

static void bury(struct link *link) {
    struct direction *both[] = {&link->up, &link->down};
    for (int each = 0; each < 2; each++) {
        discard(both[each]);
        close(both[each]->from);
    }
    link->dead = true;
    link->next = graveyard;
    graveyard = link;
}

static void empty_graveyard(void) {
    while (graveyard) {
        struct link *next = graveyard->next;
        free(graveyard);
        graveyard = next;
    }
}

static void enqueue(struct direction *one, enum kind kind, int64_t arrived, const char *bytes, size_t size) {
    struct chunk *made = malloc(sizeof *made + size);
    if (!made)
        fail("malloc");
    if (arrived < one->earliest)
        arrived = one->earliest;
    int64_t due = arrived + delay;
    if (due < one->last_due)
        due = one->last_due;
    one->last_due = due;
    *made = (struct chunk){.due = due, .kind = kind, .size = size};
    if (size)
        memcpy(made->bytes, bytes, size);
    if (one->last)
        one->last->next = made;
    else
        one->first = made;
    one->last = made;
    one->queued += size;
    one->full = one->queued > MOST_QUEUED;
    schedule(one);
}

static void end_reading(struct direction *one, enum kind kind) {
    one->read_all = true;
    enqueue(one, kind, now(CLOCK_MONOTONIC), NULL, 0);
    watch(one);
}

/* How long ago the kernel received the last of the bytes just read; at most the delay. */
static int64_t age(struct msghdr *message) {
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each))
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SO_TIMESTAMPNS) {
            struct timespec at;
            memcpy(&at, CMSG_DATA(each), sizeof at);
            int64_t found = now(CLOCK_REALTIME) - (at.tv_sec * SECOND + at.tv_nsec);
            return found < 0 ? 0 : found > delay ? delay : found;
        }
    return 0;
}

static void receive(struct direction *one) {
    static char bytes[READ_SIZE];
    char control[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec into = {bytes, sizeof bytes};
    struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(one->from, &message, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        end_reading(one, size ? RESET : END);
        return;
    }
    int64_t since = age(&message); /* before the clock that follows: an interruption in between can only make the delay longer */
    enqueue(one, DATA, now(CLOCK_MONOTONIC) - since, bytes, (size_t)size);
    struct link *link = one->link;
    bool is_client = one == &link->up;
    *(is_client ? &link->forward->sent : &link->forward->received) += size;
    if (is_client && !link->client_spoke)
        link->forward->exchanges++;
    link->client_spoke = is_client;
    watch(one);
}

/* Writes what is due. */
static void deliver(struct direction *one, int64_t at) {
    struct direction *target = one->opposite; /* its `from` is where this one writes to */
    struct chunk *each;
    unschedule(one);
    while ((each = one->first) && each->due <= at) {
        if (each->kind == RESET) {
            struct linger at_once = {1, 0}; /* close then sends RST */
            setsockopt(target->from, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
            bury(one->link);
            return;
        }
        if (each->kind == END) {
            shutdown(target->from, SHUT_WR);
            one->written_all = true;
        } else {
            ssize_t size = send(target->from, each->bytes + each->sent, each->size - each->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
                one->blocked = true;
                watch(target);
                return;
            }
            if (size < 0) { /* the receiver has reset its connection: the sender hears of it after the delay */
                discard(one);
                one->read_all = true;
                watch(one);
                end_reading(target, RESET);
                return;
            }
            if (!each->sent) {
                one->link->forward->delivered++;
                one->link->forward->late += now(CLOCK_MONOTONIC) - each->due;
            }
            each->sent += (size_t)size;
            one->queued -= (size_t)size;
            if (each->sent < each->size)
                continue;
        }
        one->first = each->next;
        if (!one->first)
            one->last = NULL;
        free(each);
    }
    if (one->full && one->queued <= MOST_QUEUED) {
        one->full = false;
        watch(one);
    }
    if (one->written_all && target->written_all)
        bury(one->link);
    else
        schedule(one);
}

static void prepare(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
}

static void accept_all(struct forward *forward) {
    int client;
    while ((client = accept4(forward->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        int64_t at = now(CLOCK_MONOTONIC);
        int server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        struct link *link = calloc(1, sizeof *link);
        if (server < 0 || !link)
            fail("socket");
        prepare(client);
        prepare(server);
        forward->connections++;
        link->forward = forward;
        /* Establishing a connection takes a round trip: until then the client can't send. The server's end is established when
           the client's answer has arrived, half a round trip later. */
        link->up = (struct direction){.what = CONNECTION, .link = link, .opposite = &link->down, .from = client};
        link->down = (struct direction){.what = CONNECTION, .link = link, .opposite = &link->up, .from = server};
        link->up.earliest = at + 2 * delay;
        link->down.earliest = at + 3 * delay;
        int failed = connect(server, (struct sockaddr *)&forward->server, sizeof forward->server) && errno != EINPROGRESS;
        if (failed)
            end_reading(&link->down, RESET);
        watch(&link->up);
        watch(&link->down);
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
        fail("accept4");
}

/* --- commands and the loop --------------------------------------------------------------------------------------------- */

static void obey(char *line) {
    long long given;
    if (sscanf(line, "delay %lld", &given) == 1) {
        delay = given;
        puts("ok");
    } else {
        for (int each = 0; each < forward_count; each++) {
            struct forward *one = &forwards[each];
            printf("%lld %lld %lld %lld ", one->connections, one->exchanges, one->sent, one->received);
            printf("%lld %lld ", one->delivered, one->late);
        }
        puts("");
    }
    fflush(stdout);
}

static void read_commands(void) {
    static char line[LINE];
    static size_t length;
    ssize_t size = read(STDIN_FILENO, line + length, sizeof line - 1 - length);
    if (size <= 0)
        exit(0); /* whoever started us has ended */
    length += (size_t)size;
    line[length] = 0;
    if (line[length - 1] == '\n') {
        length = 0;
        obey(line);
    }
}

static void set_timer(void) {
    if (!heaped || heap[0]->first->due == timer_at)
        return;
    int64_t at = timer_at = heap[0]->first->due;
    struct itimerspec when = {.it_value = {at / SECOND, at % SECOND}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL))
        fail("timerfd_settime");
}

static void handle(struct epoll_event *event) {
    enum what what = *(enum what *)event->data.ptr;
    if (what == LISTENER)
        accept_all(event->data.ptr);
    else if (what == COMMANDS)
        read_commands();
    else if (what == CONNECTION) {
        struct direction *one = event->data.ptr;
        if (one->link->dead)
            return;
        if (one->opposite->blocked && (event->events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
            one->opposite->blocked = false;
            watch(one);
            schedule(one->opposite);
        }
        if (!one->read_all && !one->full && (event->events & (EPOLLIN | EPOLLERR | EPOLLHUP)))
            receive(one);
    }
}

static void add(int fd, uint32_t events, const void *what) {
    struct epoll_event event = {.events = events, .data.ptr = (void *)what};
    if (epoll_ctl(polled, EPOLL_CTL_ADD, fd, &event))
        fail("epoll_ctl");
}

static bool hurry(void) {
    struct sched_param first = {.sched_priority = 1};
    return !sched_setscheduler(0, SCHED_FIFO, &first);
}

int main(int count, char **given) {
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    if ((polled = epoll_create1(EPOLL_CLOEXEC)) < 0 || (timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)) < 0)
        fail("epoll or timerfd");
    add(timer, EPOLLIN | EPOLLET, &timer_event);
    add(STDIN_FILENO, EPOLLIN, &commands_event);
    for (int each = 1; each + 2 < count && forward_count < MOST_FORWARDS; each += 3) {
        struct forward *one = &forwards[forward_count++];
        one->what = LISTENER;
        one->listener = atoi(given[each]);
        one->server = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(given[each + 2]))};
        if (inet_pton(AF_INET, given[each + 1], &one->server.sin_addr) != 1)
            fail(given[each + 1]);
        fcntl(one->listener, F_SETFL, O_NONBLOCK);
        prepare(one->listener);
        add(one->listener, EPOLLIN, one);
    }
    puts(hurry() ? "ready first" : "ready");
    fflush(stdout);
    for (struct epoll_event events[EVENTS];;) {
        set_timer();
        int found = epoll_wait(polled, events, EVENTS, -1);
        if (found < 0 && errno != EINTR)
            fail("epoll_wait");
        for (int each = 0; each < found; each++)
            handle(&events[each]);
        for (int64_t at = now(CLOCK_MONOTONIC); heaped && heap[0]->first->due <= at;)
            deliver(heap[0], at);
        empty_graveyard();
    }
}
