/* Preloaded into every process of a run on several hosts: what would listen at all addresses of the host listens at the
   one of the cluster, and what takes any port there takes one of the range, if there is a range.

   Ray's servers know the loopback interface or all of them, and nothing between. LISTEN_AT and LISTEN_PORTS are set by
   own_address.py: an address in numbers, and "first-last". */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int (*next_bind)(int, const struct sockaddr *, socklen_t);
static int (*next_listen)(int, int);
static struct in_addr own4;
static struct in6_addr own6;
static int own_family, first_port, last_port;

__attribute__((constructor)) static void read_settings(void) {
    next_bind = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
    next_listen = (int (*)(int, int))dlsym(RTLD_NEXT, "listen");
    const char *address = getenv("HYBRIDFLOW_LISTEN_AT"), *ports = getenv("HYBRIDFLOW_LISTEN_PORTS");
    if (address != NULL && inet_pton(AF_INET, address, &own4) == 1)
        own_family = AF_INET;
    else if (address != NULL && inet_pton(AF_INET6, address, &own6) == 1)
        own_family = AF_INET6;
    if (ports == NULL || sscanf(ports, "%d-%d", &first_port, &last_port) != 2)
        first_port = last_port = 0;
}

static int option(int fd, int level, int name) {
    int value = 0;
    socklen_t length = sizeof value;
    return getsockopt(fd, level, name, &value, &length) == 0 ? value : 0;
}

static void set_option(int fd, int name, int value) { setsockopt(fd, SOL_SOCKET, name, &value, sizeof value); }

/* Put the cluster's address in the place of all addresses; whether the result is at the cluster's address. */
static int at_own_address(int fd, struct sockaddr_storage *where) {
    if (where->ss_family == AF_INET) {
        struct in_addr *address = &((struct sockaddr_in *)where)->sin_addr;
        if (address->s_addr == htonl(INADDR_ANY))
            address->s_addr = own_family == AF_INET ? own4.s_addr : htonl(INADDR_LOOPBACK);
        return own_family == AF_INET && address->s_addr == own4.s_addr;
    }
    struct in6_addr *address = &((struct sockaddr_in6 *)where)->sin6_addr, mapped = IN6ADDR_ANY_INIT;
    mapped.s6_addr[10] = mapped.s6_addr[11] = 0xff; /* ::ffff:0.0.0.0 */
    int any = IN6_IS_ADDR_UNSPECIFIED(address) || IN6_ARE_ADDR_EQUAL(address, &mapped);
    memcpy(&mapped.s6_addr[12], &own4, sizeof own4);
    if (any && own_family == AF_INET6)
        *address = own6;
    else if (any) /* a socket of both families can have an IPv4 address; one of IPv6 alone stays within the host */
        *address = option(fd, IPPROTO_IPV6, IPV6_V6ONLY) ? in6addr_loopback : mapped;
    return IN6_ARE_ADDR_EQUAL(address, own_family == AF_INET6 ? &own6 : &mapped);
}

static in_port_t *port_of(struct sockaddr_storage *where) {
    return where->ss_family == AF_INET ? &((struct sockaddr_in *)where)->sin_port
                                       : &((struct sockaddr_in6 *)where)->sin6_port;
}

/* Take a free port of the range. Ports that are only waiting for late packets come last. */
static int bind_in_range(int fd, struct sockaddr_storage *where, socklen_t length) {
    static unsigned begun;
    int count = last_port - first_port + 1, reuse = option(fd, SOL_SOCKET, SO_REUSEADDR);
    unsigned start = (unsigned)getpid() * 7 + __atomic_fetch_add(&begun, 1, __ATOMIC_RELAXED);
    set_option(fd, SO_REUSEPORT, 0); /* another server's port is not free */
    for (int pass = 0; pass <= (reuse != 0); pass++) {
        set_option(fd, SO_REUSEADDR, pass);
        for (int tried = 0; tried < count; tried++) {
            *port_of(where) = htons(first_port + (start + tried) % count);
            if (next_bind(fd, (struct sockaddr *)where, length) == 0)
                return 0;
            if (errno != EADDRINUSE && errno != EACCES)
                return -1;
        }
    }
    fprintf(stderr, "hybridflow: network.ports: all %d ports %d-%d are in use on this host\n", count, first_port, last_port);
    errno = EADDRINUSE;
    return -1;
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
    struct sockaddr_storage where;
    int known = address != NULL && length <= sizeof where &&
                ((address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) ||
                 (address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)));
    if (own_family == 0 || !known)
        return next_bind(fd, address, length);
    memcpy(&where, address, length);
    int own = at_own_address(fd, &where);
    if (own && first_port != 0 && *port_of(&where) == 0 && option(fd, SOL_SOCKET, SO_TYPE) == SOCK_STREAM &&
        !option(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT))
        return bind_in_range(fd, &where, length);
    return next_bind(fd, (struct sockaddr *)&where, length);
}

/* A socket that was never bound would listen at all addresses. */
int listen(int fd, int backlog) {
    struct sockaddr_storage where;
    socklen_t length = sizeof where;
    if (own_family != 0 && getsockname(fd, (struct sockaddr *)&where, &length) == 0 &&
        (where.ss_family == AF_INET || where.ss_family == AF_INET6) && *port_of(&where) == 0 &&
        bind(fd, (struct sockaddr *)&where, length) != 0)
        return -1;
    return next_listen(fd, backlog);
}
