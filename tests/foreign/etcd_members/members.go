// Package integration starts the members that etcd's integration tests ask for as processes of RAFTKV_PROGRAM.
//
// It has the names of etcd's package of this path, of which tests.foreign.etcd_suites takes the rest: the bridge before
// a member's clients, the clients, and the gRPC proxy that lies between if the tests are built with cluster_proxy.
package integration

import (
	"context"
	"crypto/tls"
	"fmt"
	"io/ioutil"
	"math/rand"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/clientv3"
	epb "go.etcd.io/etcd/etcdserver/api/v3election/v3electionpb"
	lockpb "go.etcd.io/etcd/etcdserver/api/v3lock/v3lockpb"
	pb "go.etcd.io/etcd/etcdserver/etcdserverpb"
	"go.etcd.io/etcd/pkg/transport"
	"go.etcd.io/etcd/pkg/types"
	"google.golang.org/grpc"
)

const (
	// RequestWaitTimeout is what tests give a request, or the loss of a leader.
	RequestWaitTimeout = 4 * time.Second
	tickDuration       = 20 * time.Millisecond
	electionTicks      = 10
	startLimit         = 60 * time.Second
	pollInterval       = 10 * time.Millisecond
)

func fixture(folder, name string, clientCertAuth bool) transport.TLSInfo {
	return transport.TLSInfo{
		KeyFile:        "./" + folder + "/" + name + ".key.insecure",
		CertFile:       "./" + folder + "/" + name + ".crt",
		TrustedCAFile:  "./" + folder + "/ca.crt",
		ClientCertAuth: clientCertAuth,
	}
}

var (
	testTLSInfo          = fixture("fixtures", "server", true)
	testTLSInfoIP        = fixture("fixtures", "server-ip", true)
	testTLSInfoExpired   = fixture("fixtures-expired", "server", true)
	testTLSInfoExpiredIP = fixture("fixtures-expired", "server-ip", true)

	defaultTokenJWT = "jwt,pub-key=./fixtures/server.crt,priv-key=./fixtures/server.key.insecure,sign-method=RS256,ttl=1s"
)

// ClusterConfig has the fields of etcd's. What raftkv has no flag for is not used.
type ClusterConfig struct {
	Size                        int
	PeerTLS                     *transport.TLSInfo
	ClientTLS                   *transport.TLSInfo
	AuthToken                   string
	AuthTokenTTL                uint
	QuotaBackendBytes           int64
	MaxTxnOps                   uint
	MaxRequestBytes             uint
	SnapshotCount               uint64
	SnapshotCatchUpEntries      uint64
	GRPCKeepAliveMinTime        time.Duration
	GRPCKeepAliveInterval       time.Duration
	GRPCKeepAliveTimeout        time.Duration
	SkipCreatingClient          bool
	ClientMaxCallSendMsgSize    int
	ClientMaxCallRecvMsgSize    int
	UseIP                       bool
	UseGRPC                     bool
	EnableLeaseCheckpoint       bool
	LeaseCheckpointInterval     time.Duration
	LeaseCheckpointPersist      bool
	WatchProgressNotifyInterval time.Duration
	CorruptCheckTime            time.Duration
}

type cluster struct {
	cfg     *ClusterConfig
	Members []*member
}

// ClusterV3 is a cluster with a client for each member.
type ClusterV3 struct {
	*cluster
	mu      sync.Mutex
	clients []*clientv3.Client
}

type grpcAPI struct {
	Cluster     pb.ClusterClient
	KV          pb.KVClient
	Lease       pb.LeaseClient
	Watch       pb.WatchClient
	Maintenance pb.MaintenanceClient
	Auth        pb.AuthClient
	Lock        lockpb.LockClient
	Election    epb.ElectionClient
}

// ServerConfig has what tests read, or change before a restart, of the configuration of etcd's server.
type ServerConfig struct {
	Name              string
	DataDir           string
	PeerURLs          types.URLs
	ClientURLs        types.URLs
	QuotaBackendBytes int64
	CorruptCheckTime  time.Duration
	TickMs            uint
	ElectionTicks     int
}

type member struct {
	ServerConfig
	PeerTLSInfo   *transport.TLSInfo
	ClientTLSInfo *transport.TLSInfo
	DialOptions   []grpc.DialOption

	cfg        *ClusterConfig
	s          *server
	grpcAddr   string
	grpcBridge *bridge
	peerBridge *peerBridge
	clientPort string
	peerPort   string
	initial    string
	state      string
	isLearner  bool
	running    *exec.Cmd
	ended      chan struct{}
	readyc     chan struct{}
	log        string
}

// server answers as an EtcdServer of etcd does, by calls to the member.
type server struct {
	m  *member
	id types.ID
}

var ports = rand.New(rand.NewSource(time.Now().UnixNano()))

// freePort returns a port below those that the kernel gives connections, which would take it before the member does.
func freePort() string {
	for {
		port := fmt.Sprint(12000 + ports.Intn(20000))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			l.Close()
			return port
		}
	}
}

func scheme(info *transport.TLSInfo) string {
	if info == nil {
		return "http"
	}
	return "https"
}

func fail(t testing.TB, err error) {
	if t == nil {
		panic(err)
	}
	t.Fatal(err)
}

func (c *cluster) newMember(t testing.TB) *member {
	m := &member{cfg: c.cfg, PeerTLSInfo: c.cfg.PeerTLS, ClientTLSInfo: c.cfg.ClientTLS, state: "new"}
	m.Name = fmt.Sprint(rand.Int())
	m.QuotaBackendBytes, m.CorruptCheckTime = c.cfg.QuotaBackendBytes, c.cfg.CorruptCheckTime
	m.TickMs, m.ElectionTicks = uint(tickDuration/time.Millisecond), electionTicks
	m.clientPort, m.peerPort = freePort(), freePort()
	m.s = &server{m: m}
	var err error
	if m.DataDir, err = ioutil.TempDir("", "member"); err != nil {
		fail(t, err)
	}
	m.log = m.DataDir + ".log"
	if m.peerBridge, err = newPeerBridge(c, "127.0.0.1:"+m.peerPort); err != nil {
		fail(t, err)
	}
	m.PeerURLs = types.MustNewURLs([]string{scheme(m.PeerTLSInfo) + "://" + m.peerBridge.l.Addr().String()})
	m.ClientURLs = types.MustNewURLs([]string{scheme(m.ClientTLSInfo) + "://127.0.0.1:" + m.clientPort})
	m.initial = m.Name + "=" + m.PeerURLs[0].String()
	return m
}

// NewClusterByConfig returns a cluster whose members do not run yet.
func NewClusterByConfig(t testing.TB, cfg *ClusterConfig) *cluster {
	clus := &cluster{cfg: cfg}
	var initial []string
	for i := 0; i < cfg.Size; i++ {
		m := clus.newMember(t)
		clus.Members = append(clus.Members, m)
		initial = append(initial, m.initial)
	}
	for _, m := range clus.Members {
		m.initial = strings.Join(initial, ",")
	}
	return clus
}

// NewClusterV3 returns a running cluster and a client for each of its members.
func NewClusterV3(t testing.TB, cfg *ClusterConfig) *ClusterV3 {
	clus := &ClusterV3{cluster: NewClusterByConfig(t, cfg)}
	clus.Launch(t)
	if !cfg.SkipCreatingClient {
		for _, m := range clus.Members {
			cli, err := NewClientV3(m)
			if err != nil {
				fail(t, err)
			}
			clus.clients = append(clus.clients, cli)
		}
	}
	return clus
}

func (c *cluster) Launch(t testing.TB) {
	errc := make(chan error)
	for _, m := range c.Members {
		go func(m *member) { errc <- m.Launch() }(m)
	}
	for range c.Members {
		if err := <-errc; err != nil {
			fail(t, err)
		}
	}
	for _, m := range c.Members {
		m.waitMembers(len(c.Members))
	}
}

func (c *ClusterV3) TakeClient(idx int) {
	c.mu.Lock()
	c.clients[idx] = nil
	c.mu.Unlock()
}

func (c *ClusterV3) RandClient() *clientv3.Client { return c.clients[rand.Intn(len(c.clients))] }

func (c *ClusterV3) Client(i int) *clientv3.Client { return c.clients[i] }

func (c *ClusterV3) Terminate(t testing.TB) {
	for _, cli := range c.clients {
		if cli == nil {
			continue
		}
		if err := cli.Close(); err != nil && t != nil {
			t.Error(err)
		}
	}
	for _, m := range c.Members {
		m.Terminate(t)
	}
}

func (c *cluster) URLs() (urls []string) {
	for _, m := range c.Members {
		urls = append(urls, m.ClientURLs.StringSlice()...)
	}
	return urls
}

func (c *cluster) WaitLeader(t testing.TB) int { return c.waitLeader(t, c.Members) }

func (c *cluster) waitLeader(t testing.TB, membs []*member) int {
	for {
		seen := map[uint64]int{}
		up := 0
		for _, m := range membs {
			if m.running != nil {
				up++
				seen[m.s.Lead()]++
			}
		}
		for i, m := range membs {
			if m.running != nil && seen[uint64(m.s.ID())] == up {
				return i
			}
		}
		time.Sleep(pollInterval)
	}
}

func (c *cluster) WaitNoLeader() { c.waitNoLeader(c.Members) }

func (c *cluster) waitNoLeader(membs []*member) {
	for _, m := range membs {
		for m.running != nil && m.s.Lead() != 0 {
			time.Sleep(pollInterval)
		}
	}
}

func (c *cluster) AddMember(t testing.TB) {
	m := c.newMember(t)
	c.Members[0].call(func(ctx context.Context, cli *clientv3.Client) (err error) {
		_, err = cli.MemberAdd(ctx, m.PeerURLs.StringSlice())
		return err
	})
	c.join(t, m)
}

func (c *cluster) join(t testing.TB, m *member) {
	m.state = "existing"
	for _, other := range c.Members {
		m.initial += "," + other.Name + "=" + other.PeerURLs[0].String()
	}
	if err := m.Launch(); err != nil {
		fail(t, err)
	}
	c.Members = append(c.Members, m)
	for _, other := range c.Members {
		other.waitMembers(len(c.Members))
	}
}

func (c *cluster) RemoveMember(t testing.TB, id uint64) {
	var left []*member
	for _, m := range c.Members {
		if uint64(m.s.ID()) != id {
			left = append(left, m)
		}
	}
	err := left[0].call(func(ctx context.Context, cli *clientv3.Client) (err error) {
		_, err = cli.MemberRemove(ctx, id)
		return err
	})
	if err != nil {
		fail(t, err)
	}
	for _, m := range c.Members {
		if uint64(m.s.ID()) == id {
			m.Terminate(t)
		}
	}
	c.Members = left
}

// AddAndLaunchLearnerMember adds a learner and starts it.
func (c *ClusterV3) AddAndLaunchLearnerMember(t testing.TB) {
	m := c.newMember(t)
	m.isLearner = true
	if _, err := c.Client(0).MemberAddAsLearner(context.Background(), m.PeerURLs.StringSlice()); err != nil {
		fail(t, err)
	}
	c.join(t, m)
}

// GetLearnerMembers returns the learners that the first member knows.
func (c *ClusterV3) GetLearnerMembers() (learners []*pb.Member, err error) {
	resp, err := c.Client(0).MemberList(context.Background())
	if err != nil {
		return nil, err
	}
	for _, m := range resp.Members {
		if m.IsLearner {
			learners = append(learners, m)
		}
	}
	return learners, nil
}

// MustNewMember returns a member, not started, for what MemberAdd answered.
func (c *ClusterV3) MustNewMember(t testing.TB, resp *clientv3.MemberAddResponse) *member {
	m := c.newMember(t)
	m.isLearner, m.state = resp.Member.IsLearner, "existing"
	m.PeerURLs = types.MustNewURLs(resp.Member.PeerURLs)
	m.peerPort = m.PeerURLs[0].Port()
	m.initial = m.Name + "=" + m.PeerURLs[0].String()
	for _, other := range c.Members {
		m.initial += "," + other.Name + "=" + other.PeerURLs[0].String()
	}
	return m
}

func (m *member) words() []string {
	words := []string{
		"--name", m.Name, "--data-dir", m.DataDir,
		"--listen-client-urls", m.ClientURLs[0].String(), "--advertise-client-urls", m.ClientURLs[0].String(),
		"--listen-peer-urls", scheme(m.PeerTLSInfo) + "://127.0.0.1:" + m.peerPort,
		"--initial-advertise-peer-urls", m.PeerURLs[0].String(),
		"--initial-cluster", m.initial, "--initial-cluster-state", m.state, "--initial-cluster-token", "etcd",
		"--heartbeat-interval", fmt.Sprint(m.TickMs), "--election-timeout", fmt.Sprint(m.TickMs * uint(m.ElectionTicks)),
		"--bcrypt-cost", "4", "--strict-reconfig-check=false",
		// etcd's members in a test serve clients at once; its program waits for a quorum, and so does raftkv.
		"--wait-cluster-ready-timeout", "1s",
	}
	flag := func(name string, value interface{}) {
		if !reflect.ValueOf(value).IsZero() {
			words = append(words, name, fmt.Sprint(value))
		}
	}
	flag("--auth-token", m.cfg.AuthToken)
	flag("--auth-token-ttl", m.cfg.AuthTokenTTL)
	flag("--quota-backend-bytes", m.QuotaBackendBytes)
	flag("--max-txn-ops", m.cfg.MaxTxnOps)
	flag("--max-request-bytes", m.cfg.MaxRequestBytes)
	flag("--snapshot-count", m.cfg.SnapshotCount)
	flag("--snapshot-catchup-entries", m.cfg.SnapshotCatchUpEntries)
	flag("--grpc-keepalive-min-time", m.cfg.GRPCKeepAliveMinTime)
	flag("--grpc-keepalive-interval", m.cfg.GRPCKeepAliveInterval)
	flag("--grpc-keepalive-timeout", m.cfg.GRPCKeepAliveTimeout)
	flag("--watch-progress-notify-interval", m.cfg.WatchProgressNotifyInterval)
	flag("--corrupt-check-time", m.CorruptCheckTime)
	return append(words, append(tlsWords("--", m.cfg.ClientTLS), tlsWords("--peer-", m.PeerTLSInfo)...)...)
}

func tlsWords(prefix string, info *transport.TLSInfo) (words []string) {
	if info == nil {
		return nil
	}
	for flag, file := range map[string]string{
		"cert-file": info.CertFile, "key-file": info.KeyFile, "trusted-ca-file": info.TrustedCAFile,
	} {
		words = append(words, prefix+flag, file)
	}
	if len(info.CipherSuites) > 0 {
		var names []string
		for _, suite := range info.CipherSuites {
			names = append(names, tls.CipherSuiteName(suite))
		}
		words = append(words, "--cipher-suites", strings.Join(names, ","))
	}
	if info.ClientCertAuth {
		words = append(words, prefix+"client-cert-auth")
	}
	return words
}

// Launch starts the process, and returns when the member serves, in a cluster with a quorum, or when it has ended.
func (m *member) Launch() error {
	log, err := os.OpenFile(m.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0600)
	if err != nil {
		return err
	}
	defer log.Close()
	running := exec.Command(os.Getenv("RAFTKV_PROGRAM"), m.words()...)
	running.Stdout, running.Stderr = log, log
	running.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := running.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		running.Wait()
		close(ended)
	}()
	m.running, m.ended, m.readyc = running, ended, make(chan struct{})
	for limit := time.Now().Add(startLimit); time.Now().Before(limit); time.Sleep(pollInterval) {
		if text, _ := ioutil.ReadFile(m.log); strings.Contains(string(text), "ready to serve client requests") {
			close(m.readyc)
			m.s.ID()
			os.Truncate(m.log, 0)
			return m.openBridge()
		}
		select {
		case <-ended:
			text, _ := ioutil.ReadFile(m.log)
			return fmt.Errorf("%v has ended: %s", running.Args, text)
		default:
		}
	}
	return fmt.Errorf("%v is not ready after %v", running.Args, startLimit)
}

// openBridge begins to accept clients. A bridge ends by itself if there is nobody behind it, so the member must serve.
func (m *member) openBridge() (err error) {
	host := "localhost:"
	if m.cfg.UseIP {
		host = "127.0.0.1:"
	}
	if m.grpcBridge, err = newBridge(host+m.Name, "127.0.0.1:"+m.clientPort); err != nil {
		return err
	}
	unix := map[string]string{"http": "unix", "https": "unixs"}[scheme(m.cfg.ClientTLS)]
	m.grpcAddr = unix + "://" + m.grpcBridge.inaddr
	return nil
}

// call makes a call to this member alone, past the bridge.
func (m *member) call(do func(context.Context, *clientv3.Client) error) error {
	cfg := clientv3.Config{Endpoints: []string{m.ClientURLs[0].String()}, DialTimeout: time.Second}
	if m.cfg.ClientTLS != nil {
		var err error
		if cfg.TLS, err = m.cfg.ClientTLS.ClientConfig(); err != nil {
			return err
		}
		cfg.TLS.InsecureSkipVerify = true
	}
	cli, err := clientv3.New(cfg)
	if err != nil {
		return err
	}
	defer cli.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return do(ctx, cli)
}

func (m *member) status() (resp *clientv3.StatusResponse, err error) {
	err = m.call(func(ctx context.Context, cli *clientv3.Client) (err error) {
		resp, err = cli.Status(ctx, m.ClientURLs[0].String())
		return err
	})
	return resp, err
}

func (m *member) waitMembers(count int) {
	for {
		named := 0
		m.call(func(ctx context.Context, cli *clientv3.Client) error {
			resp, err := cli.MemberList(ctx)
			if err == nil {
				for _, other := range resp.Members {
					if len(other.ClientURLs) > 0 {
						named++
					}
				}
			}
			return err
		})
		if named == count {
			return
		}
		time.Sleep(pollInterval)
	}
}

func (m *member) GRPCAddr() string               { return m.grpcAddr }
func (m *member) ID() types.ID                   { return m.s.ID() }
func (m *member) URL() string                    { return m.ClientURLs[0].String() }
func (m *member) DropConnections()               { m.grpcBridge.Reset() }
func (m *member) PauseConnections()              { m.grpcBridge.Pause() }
func (m *member) UnpauseConnections()            { m.grpcBridge.Unpause() }
func (m *member) Blackhole()                     { m.grpcBridge.Blackhole() }
func (m *member) Unblackhole()                   { m.grpcBridge.Unblackhole() }
func (m *member) ReadyNotify() <-chan struct{}   { return m.readyc }
func (m *member) StopNotify() <-chan struct{}    { return m.ended }
func (m *member) ElectionTimeout() time.Duration { return electionTicks * tickDuration }

// WaitStarted waits until the member answers, with a leader or without.
func (m *member) WaitStarted(t testing.TB) {
	for {
		if _, err := m.status(); err == nil {
			return
		}
		time.Sleep(pollInterval)
	}
}

// WaitOK waits until the member has a leader.
func (m *member) WaitOK(t testing.TB) {
	for m.s.Lead() == 0 {
		time.Sleep(pollInterval)
	}
}

// Close kills the process and ends what lies before its client port.
func (m *member) Close() {
	if m.grpcBridge != nil {
		m.grpcBridge.Close()
		m.grpcBridge = nil
	}
	if m.running != nil {
		m.running.Process.Kill()
		<-m.ended
		m.running = nil
	}
}

func (m *member) Stop(t testing.TB) {
	m.s.ID()
	m.Close()
}

func (m *member) Restart(t testing.TB) error { return m.Launch() }

func (m *member) Terminate(t testing.TB) {
	m.Close()
	m.peerBridge.close()
	os.RemoveAll(m.DataDir)
	os.Remove(m.log)
}

// InjectPartition cuts this member off from others, and them from it.
func (m *member) InjectPartition(t testing.TB, others ...*member) {
	for _, other := range others {
		m.peerBridge.cut(other, true)
		other.peerBridge.cut(m, true)
	}
}

// Pause cuts this member off from all others.
func (m *member) Pause() { m.InjectPartition(nil, m.peerBridge.c.Members...) }

// Resume undoes Pause.
func (m *member) Resume() { m.RecoverPartition(nil, m.peerBridge.c.Members...) }

// RecoverPartition undoes InjectPartition.
func (m *member) RecoverPartition(t testing.TB, others ...*member) {
	for _, other := range others {
		m.peerBridge.cut(other, false)
		other.peerBridge.cut(m, false)
	}
}

// Metric returns the value of the first line of the metrics that begins with a name.
func (m *member) Metric(name string) (string, error) {
	cli := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	resp, err := cli.Get(m.URL() + "/metrics")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := ioutil.ReadAll(resp.Body)
	for _, line := range strings.Split(string(text), "\n") {
		if strings.HasPrefix(line, name) {
			return strings.Split(line, " ")[1], nil
		}
	}
	return "", err
}

// ID asks the member once, and keeps the answer.
func (s *server) ID() types.ID {
	for s.id == 0 && s.m.running != nil {
		if resp, err := s.m.status(); err == nil {
			s.id = types.ID(resp.Header.MemberId)
		}
	}
	return s.id
}

func (s *server) Lead() uint64 {
	resp, err := s.m.status()
	if err != nil {
		return 0
	}
	return resp.Leader
}

func (s *server) Leader() types.ID { return types.ID(s.Lead()) }

// TransferLeadership has the member that has the most recent log, or the next one, lead.
func (s *server) TransferLeadership() error {
	return s.m.call(func(ctx context.Context, cli *clientv3.Client) error {
		resp, err := cli.MemberList(ctx)
		if err != nil {
			return err
		}
		for _, other := range resp.Members {
			if other.ID != uint64(s.ID()) && !other.IsLearner {
				_, err := cli.MoveLeader(ctx, other.ID)
				return err
			}
		}
		return nil
	})
}

func (s *server) Alarm(ctx context.Context, r *pb.AlarmRequest) (resp *pb.AlarmResponse, err error) {
	err = s.m.call(func(_ context.Context, cli *clientv3.Client) (err error) {
		resp, err = pb.NewMaintenanceClient(cli.ActiveConnection()).Alarm(ctx, r)
		return err
	})
	return resp, err
}

// NewClientV3 connects to a member through its bridge.
func NewClientV3(m *member) (*clientv3.Client, error) {
	cfg := clientv3.Config{
		Endpoints:          []string{m.grpcAddr},
		DialTimeout:        5 * time.Second,
		DialOptions:        append([]grpc.DialOption{grpc.WithBlock()}, m.DialOptions...),
		MaxCallSendMsgSize: m.cfg.ClientMaxCallSendMsgSize,
		MaxCallRecvMsgSize: m.cfg.ClientMaxCallRecvMsgSize,
	}
	if m.ClientTLSInfo != nil {
		var err error
		if cfg.TLS, err = m.ClientTLSInfo.ClientConfig(); err != nil {
			return nil, err
		}
	}
	return newClientV3(cfg)
}

// WaitClientV3 waits until a client can read.
func WaitClientV3(t testing.TB, kv clientv3.KV) {
	var err error
	for limit := time.Now().Add(20 * time.Second); time.Now().Before(limit); time.Sleep(pollInterval) {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		_, err = kv.Get(ctx, "/")
		cancel()
		if err == nil {
			return
		}
	}
	fail(t, err)
}

// checkLeaderTransition waits for another leader than the old one.
func checkLeaderTransition(m *member, oldLead uint64) uint64 {
	for {
		if lead := m.s.Lead(); lead != 0 && lead != oldLead {
			return lead
		}
		time.Sleep(pollInterval)
	}
}

// SortableProtoMemberSliceByPeerURLs sorts members by their first peer URL.
type SortableProtoMemberSliceByPeerURLs []*pb.Member

func (p SortableProtoMemberSliceByPeerURLs) Len() int { return len(p) }
func (p SortableProtoMemberSliceByPeerURLs) Less(i, j int) bool {
	return p[i].PeerURLs[0] < p[j].PeerURLs[0]
}
func (p SortableProtoMemberSliceByPeerURLs) Swap(i, j int) { p[i], p[j] = p[j], p[i] }

// peerBridge lies before the peer port of a member. It knows from which member a connection comes by its socket.
type peerBridge struct {
	c     *cluster
	l     net.Listener
	to    string
	mu    sync.Mutex
	off   map[*member]bool
	conns map[net.Conn]net.Conn
	done  chan struct{}
}

func newPeerBridge(c *cluster, to string) (*peerBridge, error) {
	l, err := net.Listen("tcp", "127.0.0.1:"+freePort())
	if err != nil {
		return nil, err
	}
	b := &peerBridge{c: c, l: l, to: to, off: map[*member]bool{}, conns: map[net.Conn]net.Conn{}, done: make(chan struct{})}
	go b.serve()
	return b, nil
}

func (b *peerBridge) serve() {
	var wg sync.WaitGroup
	defer func() {
		b.reset()
		wg.Wait()
		close(b.done)
	}()
	for {
		in, err := b.l.Accept()
		if err != nil {
			return
		}
		if b.refuses(in) {
			in.Close()
			continue
		}
		out, err := net.Dial("tcp", b.to)
		if err != nil {
			in.Close()
			continue
		}
		b.mu.Lock()
		b.conns[in] = out
		b.mu.Unlock()
		wg.Add(2)
		go copyAndClose(&wg, in, out)
		go copyAndClose(&wg, out, in)
	}
}

func copyAndClose(wg *sync.WaitGroup, from, to net.Conn) {
	defer wg.Done()
	buf := make([]byte, 64*1024)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, werr := to.Write(buf[:n]); werr != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	from.Close()
	to.Close()
}

func (b *peerBridge) refuses(in net.Conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for m, off := range b.off {
		if off && m.running != nil && owns(m.running.Process.Pid, in.RemoteAddr()) {
			return true
		}
	}
	return false
}

// owns says whether a process has the socket of a local address.
func owns(pid int, addr net.Addr) bool {
	_, port, _ := net.SplitHostPort(addr.String())
	var number int
	fmt.Sscan(port, &number)
	table, _ := ioutil.ReadFile("/proc/net/tcp")
	for _, line := range strings.Split(string(table), "\n") {
		words := strings.Fields(line)
		if len(words) < 10 || !strings.HasSuffix(words[1], fmt.Sprintf(":%04X", number)) {
			continue
		}
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, file := range files {
			if link, _ := os.Readlink(file); link == "socket:["+words[9]+"]" {
				return true
			}
		}
	}
	return false
}

func (b *peerBridge) cut(m *member, off bool) {
	b.mu.Lock()
	b.off[m] = off
	b.mu.Unlock()
	b.reset()
}

func (b *peerBridge) reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for in, out := range b.conns {
		in.Close()
		out.Close()
	}
	b.conns = map[net.Conn]net.Conn{}
}

func (b *peerBridge) close() {
	b.l.Close()
	<-b.done
}

// clusterMustProgress writes through the first member, and reads it from the others.
func clusterMustProgress(t testing.TB, membs []*member) {
	key := fmt.Sprint(rand.Int())
	for i, m := range membs {
		err := m.call(func(ctx context.Context, cli *clientv3.Client) error {
			if i == 0 {
				_, err := cli.Put(ctx, key, "bar")
				return err
			}
			resp, err := cli.Get(ctx, key)
			if err == nil && len(resp.Kvs) != 1 {
				err = fmt.Errorf("%s lacks %s", m.Name, key)
			}
			return err
		})
		if err != nil {
			fail(t, err)
		}
	}
}

// ReqTimeout is what etcd's server gives a request.
func (c ServerConfig) ReqTimeout() time.Duration {
	return 5*time.Second + 2*time.Duration(c.ElectionTicks)*time.Duration(c.TickMs)*time.Millisecond
}
